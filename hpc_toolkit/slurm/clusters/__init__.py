"""Facts about sites: the layers of files that state them, and their partitions.

Here are the kinds of nodes: resources, the part of a node that GPUs stand for, Slurm's records.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from hpc_toolkit.system.quantities import counted, format_mem

_SLICE = re.compile(r"\d+g\.?\d+gb|\.\d$|(^|[-_.])(mig|vgpu)", re.IGNORECASE)
"""Names of parts of a GPU: ``a100_3g.20gb``, ``1g.10gb``, ``l40s.4``, ``h100-mig``."""
_NAME = r"[A-Za-z0-9_.:=-]+"
_UNITS = "KMGTP"
_FEATURE_SETS = 4
"""Most sets of features that make kinds of their own of nodes with equal resources."""


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


def has_features(constraint: str, kind: NodeKind, known: frozenset[str]) -> bool:
    """Return whether nodes of a kind may satisfy features joined by "&" or by "|".

    A feature that no kind lists may be on any node. Constraints with brackets, counts or both
    operators are left to Slurm.
    """
    if not re.fullmatch(rf"{_NAME}([&,]{_NAME})*|{_NAME}([|]{_NAME})+", constraint):
        return True
    holds = [one in kind.features or one not in known for one in re.split("[&,|]", constraint)]
    return any(holds) if "|" in constraint else all(holds)


def kinds_of_records(nodes: Sequence[Mapping[str, str]]) -> list[NodeKind]:
    """Return the kind of each node, with a name."""
    shapes, sizes = [_shape(node) for node in nodes], defaultdict[NodeKind, set[int]](set)
    for shape in shapes:
        sizes[replace(shape, mem_mib=None)].add(shape.mem_mib or 0)
    # Nodes whose memory differs by a percent are of one kind, with the smallest memory.
    smallest: dict[tuple[NodeKind, int], int] = {}
    for shape, all_sizes in sizes.items():
        least = 0
        for size in sorted(all_sizes):
            least = size if size > least * 1.01 else least
            smallest[shape, size] = least
    for at, shape in enumerate(shapes):
        least = smallest[replace(shape, mem_mib=None), shape.mem_mib or 0]
        shapes[at] = replace(shape, mem_mib=least or None)
    texts = [node.get("AvailableFeatures", "").split(",") for node in nodes]
    sets = [frozenset(text).difference(("", "(null)", "none")) for text in texts]
    variants = defaultdict[NodeKind, list[frozenset[str]]](list)
    for shape, features in zip(shapes, sets, strict=True):
        variants[shape].append(features)
    # Features of racks would make a kind of each; the features of all nodes tell nothing.
    noise = frozenset.intersection(*sets) if sets else frozenset()
    for some in variants.values():
        numbers = Counter(feature for features in some for feature in features)
        for number in sorted(set(numbers.values())):
            if len({features - noise for features in some}) > _FEATURE_SETS:
                noise |= {feature for feature in numbers if numbers[feature] == number}
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
        further = (f"{name}-v{number}" for number in range(2, len(kinds) + 1))
        names.append(next(one for one in (name, *further) if one not in names))
    return dict(zip(kinds, names, strict=True))


def _shape(node: Mapping[str, str]) -> NodeKind:
    resources = read_gres(node.get("Gres", "").replace("(null)", ""))
    # CPUEfctv is the number of CPUs that CoreSpecCount leaves to jobs; 21.08 does not show it.
    total = number_of(node, "CPUTot") or 0
    cores = (number_of(node, "Sockets") or 0) * (number_of(node, "CoresPerSocket") or 0)
    special = (number_of(node, "CoreSpecCount") or 0) * (total // cores if cores else 1)
    cpus = number_of(node, "CPUEfctv") or max(0, total - special) or None
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
