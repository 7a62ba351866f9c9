"""Create a run directory or add items to one: completely, or not at all."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.items import Item, ItemLines, check_items, encode_segment
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.wants import Wants, refuse
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec


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
            given = items.get(stage.name)
            if given and stage.after:
                from hpc_toolkit.queue.graph import GraphLines  # few lists have one

                assert isinstance(given, GraphLines)
                given.publish(log, stage)
            elif given:
                log.add_segment(segment_of(given, stage))
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
