"""Write the results of a snapshot into a new run, as the journal of a finished worker."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.claims import Claims
from hpc_toolkit.queue.items import canonical
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.presence import FINISHED, Presence, PresenceFile
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalWriter, encode_line, release_line
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.ranks import boot_id, host_name

if TYPE_CHECKING:
    from hpc_toolkit.results.gather import Row
    from hpc_toolkit.results.snapshots import Snapshot
    from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec


def note_origin(manifest: Manifest, snapshot: Snapshot) -> None:
    """Record the snapshot in the new run's provenance; warn if other code made its results."""
    stage = manifest.stages[0].name
    code = snapshot.manifest.provenance.get("code")
    before = code.get(stage) if isinstance(code, dict) else None
    if snapshot.counts["done"] and before not in (None, manifest.provenance["code"][stage]):
        sys.stderr.write("warning: the results of the snapshot were made by other code\n")
    manifest.provenance["from"] = {
        "run": snapshot.manifest.run,
        "taken": snapshot.taken,
        **snapshot.counts,
        "provenance": snapshot.manifest.provenance,
    }


def import_results(paths: RunPaths, stage: StageSpec, rows: list[Row]) -> None:
    """Write the files of a worker named ``import-...`` that did these items and finished.

    No other process may know the run's directory yet. Raises RunError: a value cannot be stored as
    JSON.
    """
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
                    record = _unit_run(f"{stage.name}/{unit.name}", found, journal.size, at)
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


def _unit_run(unit: str, found: dict[int, Row], start: int, at: float) -> bytes:
    """The journal lines of one unit run: a result for each position, and the release."""
    named: dict[str, Any] = {"unit": unit, "generation": 1}
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
    return lines + release_line(
        start,
        lines,
        **named,
        lines=len(found),
        done=len(found),
        failed=0,
        seconds=round(sum(row["seconds"] for row in found.values()), 6),
        at=at,
    )
