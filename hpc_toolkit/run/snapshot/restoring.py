"""Start a new run from a snapshot."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.claims import Claims
from hpc_toolkit.queue.items import canonical, check_items
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.presence import FINISHED, Presence, PresenceFile
from hpc_toolkit.results.provenance import collect_provenance
from hpc_toolkit.run.handle import Run, check_placeholders, check_stage, create_run
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalWriter, encode_line
from hpc_toolkit.rundir.layout import Manifest
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.ranks import boot_id, host_name

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.results.gather import Row
    from hpc_toolkit.run.snapshot.file import Snapshot
    from hpc_toolkit.rundir.layout import RunPaths, StageSpec


def restore_run(
    root: Path,
    snapshot: Snapshot,
    *,
    changes: dict[str, Any] | None = None,
    open_end: bool | None = None,
) -> Run:
    """Create a run from a snapshot's items; items that were done stay done.

    Failed items are pending, with all of their attempts. The results are lines in the journal of
    a finished worker named ``import-...``, written before any other process knows the directory.

    Args:
        root: the directory, which must not exist.
        snapshot: the snapshot to start from.
        changes: fields of :class:`StageSpec` that replace those of the snapshot.
        open_end: whether items can be added; None: as when the snapshot was taken.

    Raises:
        ItemsError, ConfigError, WorkloadError, RunError: nothing was created.
    """
    stage = replace(snapshot.manifest.stages[0], **(changes or {}))
    check_stage(stage)
    check_items(snapshot.items, group_by=stage.group_by, taken=set())
    check_placeholders(snapshot.items, stage.workload.command)
    provenance = collect_provenance((stage,))
    code = snapshot.manifest.provenance.get("code")
    before = code.get(stage.name) if isinstance(code, dict) else None
    if snapshot.counts["done"] and before not in (None, provenance["code"][stage.name]):
        sys.stderr.write("warning: the results of the snapshot were made by other code\n")
    provenance["from"] = {
        "run": snapshot.manifest.run,
        "taken": snapshot.taken,
        **snapshot.counts,
        "provenance": snapshot.manifest.provenance,
    }
    return create_run(
        root,
        Manifest(run=root.name, stages=(stage,), provenance=provenance),
        {stage.name: snapshot.items},
        sealed=snapshot.sealed if open_end is None else not open_end,
        fill=lambda paths: _import_results(paths, stage, snapshot.rows),
    )


def _import_results(paths: RunPaths, stage: StageSpec, rows: list[Row]) -> None:
    """Write the files of a worker that did these items, one unit after the other, and finished."""
    done = {canonical(row["item"]): row for row in rows if row["state"] == "done"}
    if not done:
        return
    name = f"import-{os.getpid()}-{os.urandom(3).hex()}"
    at = round(SystemClock().wall(), 3)
    presence = Presence(
        worker=name,
        host=host_name(),
        boot=boot_id(),
        pid=os.getpid(),
        rank=0,
        job=None,
        state=FINISHED,
        done=len(done),
        started=at,
        at=at,
        note="a snapshot's results",
    )
    paths.worker_lock(name).touch()
    paths.worker_log(name).touch()
    journal = JournalWriter(paths.journal(name))
    claims = Claims(paths.stage(stage.name))
    log = StageLog(paths.stage(stage.name))
    log.poll()
    for segment in log.segments.values():
        for unit in segment.units:
            lines = zip(unit.items, segment.lines(unit), strict=True)
            found = {
                position: done[key]
                for position, line in lines
                if (key := canonical(json.loads(line))) in done
            }
            if found:
                claims.create(unit.name, 1, name)
                try:
                    record = _pass(f"{stage.name}/{unit.name}", found, journal.size, at)
                except ValueError as error:
                    message = f"a result of the snapshot is none that a run can have: {error}"
                    raise RunError(
                        message, hint="'hpctk gather --check FILE.json' may name it"
                    ) from error
                journal.append(record)
    journal.sync()
    # Last, as when a worker exits: the presence file says that all lines are written.
    PresenceFile(paths.worker(name), replace(presence, journal=journal.size)).close()
    journal.close()
    for directory in (paths.journals, paths.workers, paths.stage(stage.name).claims):
        files.sync_directory(directory)


def _pass(unit: str, found: dict[int, Row], start: int, at: float) -> bytes:
    """The journal lines of one unit run: a result for each position, and the release."""
    named = {"unit": unit, "generation": 1}
    lines = b"".join(
        encode_line(
            {
                "type": "done",
                **named,
                "item": position,
                "at": at,
                "seconds": row["seconds"],
                "from": {"worker": row["worker"], "attempts": row["attempts"]},
                "value": row["value"],
            }
        )
        for position, row in found.items()
    )
    release = {
        "type": "release",
        **named,
        "lines": len(found),
        "done": len(found),
        "failed": 0,
        "seconds": round(sum(row["seconds"] for row in found.values()), 6),
        "at": at,
        "start": start,
        "sum": f"{crc32(lines):08x}",
    }
    return lines + encode_line(release)
