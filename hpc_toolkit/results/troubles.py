"""Warnings of a status: log entries that are not visible, sick hosts, and damage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.queue.control import ControlReader

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import RunView


def hidden_entries(view: RunView) -> list[str]:
    """Warnings of log entries that cannot be read yet; no reader sees the entries after them."""
    logs = [stage.log for stage in view.stages.values() if stage.log.hidden]
    return [f"{log.waits_for}; 'hpctk doctor' shows whether it is lost" for log in logs]


def sick_hosts(view: RunView) -> list[str]:
    """Reasons of the notices about sick hosts, only the last one of each host or worker."""
    control = ControlReader(view.paths)
    control.poll()
    notices = sorted(control.health, key=lambda notice: (notice.sure, notice.at))
    last = {(one.host, "" if one.whole else one.worker): one for one in notices}
    more = "; 'hpctk submit' leaves it out for a day"
    return [one.reason + (more if one.sure and one.whole else "") for one in last.values()]


def damage(view: RunView, alive: set[str]) -> list[str]:
    """Files that cannot be read, and parts of journals that are skipped."""
    # Reading one journal may need lines of another, so the error may name that other file.
    unreadable = {
        error.filename or view.paths.journal(worker): error
        for worker, error in view.unreadable.items()
    }
    found = [
        f"{path}: cannot be read ({error.strerror}); what it says is not counted"
        for path, error in unreadable.items()
    ]
    for worker, reader in view.readers.items():
        path = view.paths.journal(worker)
        found += [f"{path}: damaged line at byte {at} is skipped" for at in reader.bad_lines]
        torn = reader.torn_bytes
        if torn and worker not in alive:  # a living worker may still be writing it
            found.append(f"{path}: torn last line ({torn} bytes, no newline) is skipped")
    return found
