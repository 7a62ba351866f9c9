"""Kinds of nodes: their resources, the part of a node that GPUs stand for, and Slurm's records."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from hpc_toolkit.system.quantities import counted, format_mem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SLICE = re.compile(r"\d+g\.?\d+gb|\.\d$|(^|[-_.])(mig|vgpu)", re.IGNORECASE)
"""Names of parts of a GPU: ``a100_3g.20gb``, ``1g.10gb``, ``l40s.4``, ``h100-mig``."""
_NAME = r"[A-Za-z0-9_.:=-]+"
_FEATURE = rf"\*\d+|{_NAME}"
_UNITS = "KMGTP"
_FEATURE_SETS = 4
"""Most sets of features that make kinds of their own of nodes with equal resources."""
_TRUE, _FALSE = "\x01", "\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """Nodes that are equal to a job. None means unknown."""

    name: str = ""
    """Its key in ``[kinds]``; "" for the only kind of a cluster without that table."""
    nodes: int | None = None
    """Number of nodes; a partition states its own."""
    cpus: int | None = None
    """CPUs of a node that a job can have."""
    mem_mib: int | None = None
    """Memory of a node that a job can have."""
    gpus: tuple[tuple[str, int | None], ...] | None = ()
    """GPUs of a node as Slurm's Gres names them, 'a100:4' or 'h100_1g.10gb:14,h100:2'; without a
    type '4', without GPUs ''."""
    gres: tuple[tuple[str, int], ...] = ()
    """Other generic resources of a node, such as 'shard:16,nvme:1' or 'tmpfs:100G'."""
    features: tuple[str, ...] = ()
    """Features that only some kinds of nodes have, for '--sbatch constraint=FEATURE'."""

    def __str__(self) -> str:
        gpus = [f"{counted(n or 0, 'GPU')} {kind}".rstrip() for kind, n in self.gpus or ()]
        gres = [f"{name}:{format_count(number)}" for name, number in self.gres]
        cpus = [counted(self.cpus, "CPU")] if self.cpus else []
        memory = [format_mem(self.mem_mib)] if self.mem_mib else []
        return ", ".join([*gpus, *gres, *cpus, *memory, *self.features])

    def amount(self, resource: str) -> int | None:
        """Return how much a node has of "cpus", "mem", a resource of Slurm with or without a type,
        or GPUs of a type, "gpu:a100"; "gpu" are complete GPUs of any one type. None if unknown.
        """
        if resource in ("cpus", "mem"):
            return self.cpus if resource == "cpus" else self.mem_mib
        name, _, gpu_type = resource.partition(":")
        if name != "gpu":
            return sum(number for one, number in self.gres if f"{one}:".startswith(f"{resource}:"))
        if self.gpus is None:
            return None
        fit = {gpu_type} if gpu_type else {one for one, _ in self.gpus if not is_slice(one)}
        # Slurm refuses a type for GPUs without one; a file without kinds may not know their type.
        fit |= set() if self.name else {""}
        numbers = [number for one, number in self.gpus if one in fit]
        return None if None in numbers else max(map(int, filter(None, numbers)), default=0)

    def complete_gpus(self, at_least: int) -> list[str]:
        """Return the types of complete GPUs of which a node has that many."""
        return [
            kind
            for kind, number in self.gpus or ()
            if not is_slice(kind) and (number or at_least) >= at_least
        ]

    def share(self, gpu_type: str | None, gpus: int) -> Fraction | None:
        """Return the part of a node that belongs to some of its GPUs; None if it is unknown.

        Slices of a GPU count in proportion to their size.
        """
        if not self.gpus or any(number is None for _, number in self.gpus):
            return None
        weights = {kind: _weight(kind, self.gpus) for kind, _ in self.gpus}
        whole = sum((weights[kind] * (number or 0) for kind, number in self.gpus), Fraction(0))
        chosen = gpu_type if gpu_type in weights else max(weights, key=lambda kind: weights[kind])
        return min(Fraction(1), weights[chosen] * gpus / whole) if whole else None


def is_slice(gpu_type: str) -> bool:
    return _SLICE.search(gpu_type) is not None


def _weight(kind: str, gpus: tuple[tuple[str, int | None], ...]) -> Fraction:
    """Return the size of a GPU or slice, as a part of the largest GPU of its node."""
    if parts := re.search(r"(\d+)g\.?\d+gb", kind, re.IGNORECASE):
        # Seven slices of MIG make a GPU, four an A30.
        return Fraction(int(parts[1]), 4 if "a30" in kind.lower() else 7)
    part = re.search(r"\.([1-9]\d*)$", kind)
    beside = any(not is_slice(other) for other, _ in gpus)
    return Fraction(1, int(part[1])) if part and beside else Fraction(1)


def read_gres(text: str) -> list[tuple[str, str, int]]:
    """Return name, type and number of each generic resource of a node or a request.

    ``gpu:l40s:4(S:0-1),tmpfs:1K`` gives ``("gpu", "l40s", 4)`` and ``("tmpfs", "", 1024)``.
    """
    found: Counter[tuple[str, str]] = Counter()
    for entry in filter(None, re.sub(r"\([^)]*\)", "", text).split(",")):
        name, *words = (word for word in entry.split(":") if word != "no_consume")
        count = re.fullmatch(rf"(\d+)([{_UNITS}]?)", words[-1].upper()) if words else None
        kind = words[0] if words[: -1 if count else None] else ""
        unit = 1024 ** (_UNITS.index(count[2]) + 1) if count and count[2] else 1
        found[name, kind] += int(count[1]) * unit if count else 1
    return [(*key, number) for key, number in found.items()]


def format_count(number: int) -> str:
    """Write a number of a resource as Slurm reads it: ``100G``."""
    power = next(n for n in range(len(_UNITS), -1, -1) if number % 1024**n == 0 or not n)
    return f"{number // 1024**power}{_UNITS[power - 1]}" if power and number else str(number)


def alternatives(constraint: str) -> list[str]:
    """Return a constraint for each choice of ``[a|b]``, of which all nodes need the same one."""
    found = re.search(r"\[([^\]*]*)\]", constraint)
    parts = re.split(r"\|(?![^(]*\))", found[1]) if found else []
    return [constraint.replace(found[0], f"({one})") for one in parts if found] or [constraint]


def counts(constraint: str) -> list[tuple[str, int]]:
    """Return the parts of ``[a*2&(b&c)*4]`` with how many nodes need each."""
    found = re.findall(rf"(\([^()]*\)|{_NAME})\*(\d+)", constraint)
    return [(part, int(number)) for part, number in found]


def has_features(constraint: str, kind: NodeKind, known: frozenset[str]) -> bool:
    """Return whether nodes of a kind may satisfy a constraint such as ``(a100|h100)&ib``.

    A feature that no kind lists may be on any node. With counts, as in ``[a*2&b*4]``, a node needs
    one of the parts. Slurm gives no operator precedence: it reads from left to right.
    """

    def holds(word: re.Match[str]) -> str:
        if word[0].startswith("*"):
            return word[0]
        return _TRUE if word[0] in kind.features or word[0] not in known else _FALSE

    def inner(part: re.Match[str]) -> str:
        first, *more = re.split("([|&,])", part[1])
        value = _TRUE in first
        for operator, word in zip(more[::2], more[1::2], strict=True):
            either = operator == "|" or "*" in part[1]
            value = (value or _TRUE in word) if either else (value and _TRUE in word)
        return _TRUE if value else _FALSE

    text = re.sub(_FEATURE, holds, constraint).replace("[", "(").replace("]", ")")
    text = f"({text})"
    while (simpler := re.sub(r"\(([^()]*)\)", inner, text)) != text:
        text = simpler
    return _FALSE not in text


def kinds_of_records(nodes: Sequence[Mapping[str, str]]) -> list[NodeKind]:
    """Return the kind of each node, with a name."""
    shapes, sizes = [_shape(node) for node in nodes], defaultdict[NodeKind, set[int]](set)
    for shape in shapes:
        sizes[replace(shape, mem_mib=None)].add(shape.mem_mib or 0)
    # Nodes whose memory differs by a percent are of one kind, with the smallest memory.
    for at, shape in enumerate(shapes):
        near = (m for m in sizes[replace(shape, mem_mib=None)] if m * 1.01 >= (shape.mem_mib or 0))
        shapes[at] = replace(shape, mem_mib=min(near) or None)
    texts = [node.get("AvailableFeatures", "").split(",") for node in nodes]
    sets = [frozenset(text).difference(("", "(null)", "none")) for text in texts]
    variants = defaultdict[NodeKind, set[frozenset[str]]](set)
    for shape, features in zip(shapes, sets, strict=True):
        variants[shape].add(features)
    # Features of racks would make a kind of each; the features of all nodes tell nothing.
    noise = frozenset.intersection(*sets) if sets else frozenset()
    for some in variants.values():
        if len(some) > _FEATURE_SETS:
            noise |= frozenset.union(*some) - frozenset.intersection(*some)
    kinds = [
        replace(shape, features=tuple(sorted(features - noise)))
        for shape, features in zip(shapes, sets, strict=True)
    ]
    names = _names([kind for kind, _ in Counter(kinds).most_common()])
    return [replace(kind, name=names[kind]) for kind in kinds]


def _names(kinds: list[NodeKind]) -> dict[NodeKind, str]:
    """Return a name for each kind: its GPUs or CPUs, and its memory if others have the same."""
    short = {
        kind: "-".join(f"{gpu or 'gpu'}x{n}" for gpu, n in kind.gpus or ())
        or f"cpu{kind.cpus or ''}"
        for kind in kinds
    }
    names: list[str] = []
    for kind, text in short.items():
        name = re.sub(r"[^\w-]", "_", text)[:40]
        if kind.mem_mib and list(short.values()).count(text) > 1:
            name += f"-{format_mem(kind.mem_mib)}"
        number = sum(name in (other, other.partition("-v")[0]) for other in names)
        names.append(f"{name}-v{number + 1}" if number else name)
    return dict(zip(kinds, names, strict=True))


def _shape(node: Mapping[str, str]) -> NodeKind:
    resources = read_gres(node.get("Gres", "").replace("(null)", ""))
    # Since 22.05, CPUEfctv is the number of CPUs that CoreSpecCount leaves to jobs.
    cpus = number_of(node, "CPUEfctv") or number_of(node, "CPUTot")
    mem = number_of(node, "RealMemory")
    kept = number_of(node, "MemSpecLimit") or 0
    # Slurm shows RealMemory=1 if it is not configured.
    known = mem is not None and mem > max(1, kept)
    return NodeKind(
        cpus=cpus,
        mem_mib=mem - kept if mem and known else None,
        gpus=tuple((kind, n) for name, kind, n in resources if name == "gpu" and n),
        gres=tuple(
            (f"{name}:{kind}".rstrip(":"), n) for name, kind, n in resources if name != "gpu"
        ),
    )


def number_of(record: Mapping[str, str], key: str) -> int | None:
    """Return a positive number; None for words such as UNLIMITED."""
    text = record.get(key, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
