"""Items as the user gives them: checked, encoded as a segment, and added to a run."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hpc_toolkit.errors import ItemsError, RunError, near_miss
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.units import MAX_UNIT, plan_units, runs_of
from hpc_toolkit.queue.wants import Wants, refuse
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec
from hpc_toolkit.system.jsonlines import (
    batches,
    encode,
    encode_each,
    is_kept,
    not_json,
    without_collections,
)

Item = dict[str, Any]

_encode_sorted = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def canonical(item: Item) -> bytes:
    """Bytes that are equal iff two items are equal."""
    return _encode_sorted(item).encode()


class ItemLines:
    """Items of one list as lines of JSON, which take a tenth of the memory of objects."""

    def __init__(self, items: Iterable[Item] = (), *, group_by: str | None = None) -> None:
        self.group_by = group_by
        self.lines: list[bytes] = []
        """In the order in which they were given, without newlines."""
        from array import array  # workers do without it

        self.groups = array("l")
        """Number of each item's group, if there are groups."""
        self.labels: list[Any] = []
        """Value of each group."""
        self.wants: list[str] = []
        """The want of each item (:mod:`hpc_toolkit.queue.wants`); [] if none has one of its own."""
        self._numbers: dict[str, int] = {}
        for some in batches(items):
            self.add(some, encode_each(some))

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, items: list[Item], lines: list[bytes]) -> None:
        self.lines += lines
        if self.group_by is not None:
            self.groups.extend(self._group_of(item[self.group_by]) for item in items)

    def _group_of(self, label: Any) -> int:
        # Encoding takes most of the time; of other values, no JSON begins with a quote.
        key = f'"{label}' if type(label) is str else json.dumps(label, sort_keys=True)
        if key not in self._numbers:
            self._numbers[key] = len(self.labels)
            self.labels.append(label)
        return self._numbers[key]

    def publish(self, log: StageLog, stage: StageSpec) -> None:
        """Add the items to the log of a run that is being created."""
        log.add_segment(segment_of(self, stage))


class _Distinct:
    """Tells whether items differ, by a form of each that is equal iff two items are equal.

    If an item has no objects in it and the keys of the first one, this form is its line, with the
    keys in the order of the first one. That saves encoding nearly all items twice.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._keys: tuple[str, ...] = ()

    def add(self, items: list[Item], lines: list[bytes]) -> bool:
        """Whether these can be items, and differ from each other and all before; else add none."""
        if not self._keys and all(isinstance(key, str) for key in items[0]):
            self._keys = tuple(items[0])
        flat = b"".join(lines).count(b"{") == len(lines)
        alike = flat and self._keys and {self._keys}.issuperset(map(tuple, items))
        kept = alike or all(map(is_kept, items))
        forms = lines if alike else list(map(self._form, items, lines))
        if not kept or len(set(forms)) < len(forms) or not self._seen.isdisjoint(forms):
            return False
        self._seen.update(forms)
        return True

    def _form(self, item: Item, line: bytes) -> bytes:
        if line.count(b"{") > 1 or item.keys() != set(self._keys):
            return canonical(item)
        return encode({key: item[key] for key in self._keys}).encode()


def has_key(item: Container[str], key: str) -> bool:
    """Whether an item has what a command writes as ``{key}``, or as ``{key.part}``."""
    return key in item or key.partition(".")[0] in item


def _lacked(item: Item, group_by: str | None, needs: Sequence[str]) -> str | None:
    """The first key that an item should have and lacks."""
    if group_by is not None and group_by not in item:
        return group_by
    return next((key for key in needs if not has_key(item, key)), None)


@without_collections()
def check_items(
    items: Iterable[Item],
    *,
    group_by: str | None,
    taken: Iterable[Item] = (),
    needs: Sequence[str] = (),
    may_be_empty: bool = False,
) -> ItemLines:
    """Encode a list, which is read once and never held as objects.

    ``taken`` are the items that the stage has, and ``needs`` the keys that its command needs.
    Raises ItemsError: the list is empty, or an item is a duplicate, lacks a key or is not JSON.
    """
    found, distinct = ItemLines(group_by=group_by), _Distinct()
    for some in batches(taken):
        distinct.add(some, encode_each(some))
    for some in batches(items):
        lines: list[bytes] = []
        with suppress(AttributeError, TypeError, ValueError):
            if not any(_lacked(item, group_by, needs) for item in some):
                encoded = encode_each(some)
                lines = encoded if distinct.add(some, encoded) else []
        if not lines:
            _refuse(some, len(found), group_by, needs, distinct)
        found.add(some, lines)
    if not (found or may_be_empty):
        message = "the list of items is empty"
        raise ItemsError(message, hint="give at least one JSON object, one per line")
    return found


def _refuse(
    items: list[Any], first: int, group_by: str | None, needs: Sequence[str], distinct: _Distinct
) -> NoReturn:
    """Raise the ItemsError of the first of these items that is not valid; its number, from 0."""
    for number, item in enumerate(items, first):
        try:
            kept = isinstance(item, dict) and is_kept(item)
            is_new = kept and distinct.add([item], encode_each([item]))
        except (TypeError, ValueError) as error:
            message = f"item {number} is not plain JSON: {not_json(item) or error}"
            hint = "use text, finite numbers, lists and dicts"
            raise ItemsError(message, hint=hint, number=number) from error
        if not kept:
            message = f"item {number} is not a dict with text as its keys: {item!r:.200}"
            raise ItemsError(message, hint="such as {'seed': 1}; make keys text", number=number)
        if key := _lacked(item, group_by, needs):
            what = "--group-by" if key == group_by else "the command"
            message = f"item {number} has no key {key!r}, which {what} needs"
            raise ItemsError(message, hint=near_miss(key, list(item)), number=number)
        if not is_new:
            message = f"item {number} is a duplicate: {canonical(item).decode()[:200]}"
            raise ItemsError(message, hint="remove it, or add a key that differs", number=number)
    raise AssertionError(items)


def encode_segment(
    items: Iterable[Item] | ItemLines,
    *,
    group_by: str | None,
    decision: dict[str, Any] | None = None,
    unit_size: int = MAX_UNIT,
    items_per_claim: int | None = None,
    kinds: Sequence[str] | None = None,
    origins: list[Any] | None = None,
    numbers: Sequence[int] | None = None,
) -> Iterator[bytes]:
    """A segment: a header line, then the items' lines, with items of one group next to each other.

    ``unit_size``: maximum items per unit, 1 to :data:`MAX_UNIT`. ``items_per_claim``: the items of
    every unit except the last of a list or group; None: units get smaller towards the end.
    ``kinds``: the kind of each item, if kinds that appear first should be begun first; items of one
    kind are then next to each other in their group. ``origins``: of what the items were made, in a
    stage that follows another. ``numbers``: those of the items in a list whose items follow each
    other. Items of one unit have the same want. The header's ``units`` are [first item, count,
    byte offset after the header, group]; ``order``, present if items were moved, is the given
    position of each item.
    """
    given = items if isinstance(items, ItemLines) else ItemLines(items, group_by=group_by)
    lines, unit_size = given.lines, items_per_claim or unit_size
    known = {kind: number for number, kind in enumerate(dict.fromkeys(kinds or ()))}
    of_kind = [known[kind] for kind in kinds or ()]
    order = _arrange(given, of_kind)
    groups = None if group_by is None else [given.groups[index] for index in order]
    units, offset = [], 0
    wants = [given.wants[index] for index in order] if given.wants else []
    cut: list[tuple[int, int]] = []
    for start, length in runs_of(wants) or [(0, len(lines))]:
        spans = None if groups is None else runs_of(groups[start : start + length])
        found = plan_units(spans, length, unit_size=unit_size, taper=items_per_claim is None)
        cut += [(start + first, count) for first, count in found]
    for first, count in cut:
        units.append([first, count, offset, groups[first] if groups is not None else -1])
        offset += count + sum(len(lines[index]) for index in order[first : first + count])
    header: dict[str, Any] = {
        "format": 1,
        "count": len(lines),
        "unit_size": unit_size,
        "group_by": group_by,
        "groups": given.labels,
        "units": units,
    }
    if any(index != position for position, index in enumerate(order)):
        header["order"] = order
    if kinds is not None:
        header["kinds"] = [of_kind[index] for index in order]
    if decision is not None:
        header["decision"] = decision
    if origins is not None:
        header["origins"] = origins
    if numbers is not None:
        header["numbers"] = [numbers[index] for index in order]
    if set(wants) - {"{}"}:
        known = {want: number for number, want in enumerate(dict.fromkeys(wants))}
        header["wants"] = [json.loads(want) for want in known]
        header["wanted"] = [known[wants[first]] for first, _ in cut]
    yield encode(header).encode() + b"\n"
    for first, count in cut:
        yield b"".join([b"%s\n" % lines[index] for index in order[first : first + count]])


def _arrange(items: ItemLines, of_kind: list[int]) -> Sequence[int]:
    """The given position of each item, in the order of the segment."""
    known = {want: number for number, want in enumerate(dict.fromkeys(items.wants))}
    wants = [known[want] for want in items.wants]
    groups = items.groups if items.group_by is not None else ()
    keys = [*zip(*(key for key in (wants, groups, of_kind) if len(key)), strict=True)]
    positions = range(len(items))
    return sorted(positions, key=keys.__getitem__) if keys else positions


def segment_of(items: Iterable[Item] | ItemLines, stage: StageSpec) -> Iterator[bytes]:
    return encode_segment(items, group_by=stage.group_by, items_per_claim=stage.items_per_claim)


def create_directory(
    root: Path,
    manifest: Manifest,
    items: Mapping[str, list[Item] | ItemLines],
    *,
    sealed: bool,
    fill: Callable[[RunPaths], None] | None = None,
) -> None:
    """Create a run directory completely, or not at all.

    ``items`` are the initial items by stage, already checked. ``fill`` adds files before the
    directory gets its name, while no other process knows it. Raises RunError if the directory
    exists or cannot be made, or if its filesystem has no symlinks.
    """
    hint = "continue it with 'hpctk work', add items with 'hpctk add', or use another name"
    exists = RunError(f"{root} exists", hint=hint)
    if root.is_symlink() or root.exists():
        raise exists
    with files.new_directory(root, exists=exists) as staging:
        refusal = files.symlink_refusal(staging)
        if refusal:
            parent = root.absolute().parent
            message = f"{parent}: symbolic links do not work on this filesystem ({refusal})"
            raise RunError(message, hint="choose a directory on another filesystem")
        paths = RunPaths(staging)
        paths.make([stage.name for stage in manifest.stages])
        for stage in manifest.stages:
            log = StageLog(paths.stage(stage.name))
            if given := items.get(stage.name):
                if not isinstance(given, ItemLines):
                    given = ItemLines(given, group_by=stage.group_by)
                given.publish(log, stage)
            if sealed and not stage.after:
                log.seal()
        if fill is not None:
            fill(paths)
        files.write_new(paths.manifest, [manifest.to_bytes()])
        # Whatever the umask: a run that everybody can write to would be refused.
        paths.manifest.chmod(paths.manifest.stat().st_mode & ~stat.S_IWOTH)


def add_items(
    log: StageLog, items: list[Item], stage: StageSpec, needs: Sequence[str] = ()
) -> None:
    """Add items as one segment; ``needs``: keys that the stage's command needs.

    Raises ItemsError for the items, RunError if the log is sealed.
    """
    compared, added = 0, False
    while not added:
        log.poll()
        # After a lost race, only with what the others added: many may add to a long list.
        taken = _items_after(log, compared)
        compared = log.length
        wants = Wants(stage)
        own = wants.taken(items)
        checked = check_items(own, group_by=stage.group_by, taken=taken, needs=needs)
        checked.wants = wants.each(len(checked))
        if checked.wants and stage.needs is None:
            hint = "create the run with --needs, such as cpus=1, or with an item that has needs"
            refuse(0, "items have needs, and workers do not know that they may", hint)
        added = log.add_segment(segment_of(checked, stage))


def _items_after(log: StageLog, entry: int) -> Iterator[Item]:
    for segment in log.segments.values():
        if segment.entry > entry:
            with segment.path.open("rb") as file:
                for unit in segment.units:
                    yield from segment.read(unit, fd=file.fileno())[1]
