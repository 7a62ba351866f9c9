"""What Slurm's programs print, as records: text in, values out, nothing is run.

The states are those of squeue(1) and sacct(1), JOB STATE CODES; a state that this version does not
know is kept as it is and is neither ended, waiting nor running.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

UNKNOWN = "unknown"
"""The state of a job of which Slurm said nothing; it is no failure."""

NODE_FAILURES = frozenset({"NODE_FAIL", "BOOT_FAIL"})
"""States of jobs that a node's failure ended."""

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "TIMEOUT"),
}
_WAITING = {
    *("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
}
_ON_NODES = {
    *("RUNNING", "COMPLETING", "CONFIGURING", "POWER_UP_NODE", "RESIZING", "SIGNALING"),
    *("STAGE_OUT", "STOPPED", "SUSPENDED", "UPDATE_DB", "EXPEDITING"),
}

# What has the most life in it speaks for a whole array.
_LIVELIEST = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "PENDING")

SQUEUE_FIELDS = (
    ("JobID", 24),
    ("ArrayJobID", 24),
    ("JobArrayID", 48),
    ("State", 24),
    ("RestartCnt", 12),
    ("exit_code", 16),
    ("SubmitTime", 24),
    ("StartTime", 24),
    ("EndTime", 24),
    ("Partition", 128),
    ("Reason", 256),
    ("NodeList", 1024),
    ("Name", 256),
    ("UserName", 64),
    ("Cluster", 64),
)
"""Columns of ``squeue --Format`` and their widths in bytes; squeue cuts what is longer."""
_TELL_WHEN_CUT = {"Reason", "Name"}

SACCT_FIELDS = (
    *("JobIDRaw", "JobID", "State", "ExitCode", "Submit", "Start", "End", "Partition"),
    *("NodeList", "User", "Cluster", "JobName"),
)
"""Columns of ``sacct --parsable2``; the name is last, since it may hold the delimiter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job as Slurm sees it; of an array asked for as a whole, its liveliest element."""

    id: str
    """The id that was asked for: ``123``, or ``123_4`` for element 4 of an array."""
    state: str
    """One of Slurm's words such as ``PENDING``, or ``unknown``."""
    reason: str = ""
    """Slurm's word for why it waits or ended; of an unknown job why nothing is known."""
    nodes: str = ""
    """Its nodes in Slurm's notation ``n[1-4]``; "" where it has none or the list is too long."""
    restarts: int | None = None
    """How often it was requeued; None where Slurm did not say."""
    partition: str = ""
    """Its partition."""
    submitted: float | None = None
    """Epoch seconds of the submission, or of the last requeue."""
    start: float | None = None
    """Epoch seconds when it started; of a waiting job when Slurm expects it to; None if unknown."""
    end: float | None = None
    """Epoch seconds when it ended, or will at its time limit; None if unknown."""
    exit_code: int | None = None
    """Of an ended job: exit code of its script, or 128 and the signal's number."""
    name: str = ""
    """The job's name; of one of 256 bytes or more its beginning."""
    user: str = ""
    """Login name of its user; "" where Slurm did not say."""
    cluster: str = ""
    """The cluster that gave the answer; "" where it did not say."""
    array: str = ""
    """Id of the array that it belongs to; "" for a job of its own."""
    raw: str = ""
    """SLURM_JOB_ID inside the job; differs from ``id`` in arrays."""
    raws: tuple[str, ...] = ()
    """The raw ids of its elements that Slurm still lists, of an array asked for as a whole."""
    lost: tuple[JobRecord, ...] = ()
    """Its earlier runs that a node's failure ended, as far as the accounting was asked."""
    elements: tuple[tuple[str, int], ...] = ()
    """How many elements are in which state, of an array asked for as a whole."""

    @property
    def ended(self) -> bool:
        """Whether no process of it runs any more and none will."""
        return self.state in _ENDED

    @property
    def waiting(self) -> bool:
        """Whether it is in the queue and has no nodes."""
        return self.state in _WAITING

    @property
    def running(self) -> bool:
        """Whether it holds nodes."""
        return self.state in _ON_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node as Slurm sees it."""

    name: str
    """Its name."""
    state: str
    """The base state: ``IDLE``, ``ALLOCATED``, ``MIXED``, ``DOWN``, ..., or ``unknown``."""
    flags: frozenset[str] = frozenset()
    """Flags such as ``DRAIN``, ``NOT_RESPONDING``, ``FAIL``, ``REBOOT_ISSUED``."""
    reason: str = ""
    """What an administrator or Slurm wrote about it."""

    @property
    def failed(self) -> bool:
        """Whether Slurm takes it for broken: down, failing or not responding."""
        return self.state == "DOWN" or bool(self.flags & {"FAIL", "FAILING", "NOT_RESPONDING"})


def job_id(text: str) -> bool:
    """Whether ``text`` is a job's id, of an array's element or a part of a hetjob included."""
    return re.fullmatch(r"[1-9][0-9]{0,18}([_+][0-9]{1,9})?", text) is not None


def parse_state(text: str) -> str:
    """The one word of a state: sacct writes ``CANCELLED by 1000``, and ``OUT_OF_ME+`` when short
    of room.
    """
    word = text.strip().partition(" ")[0].upper()
    if word.endswith("+"):
        known = sorted(_ENDED | _WAITING | _ON_NODES)
        word = next((one for one in known if one.startswith(word[:-1])), word)
    return word or UNKNOWN


def parse_squeue(text: bytes) -> list[JobRecord]:
    """Rows of ``squeue --noheader --array --Format=...`` with SQUEUE_FIELDS; others are skipped.

    They are cut as bytes, as squeue pads them: a name that is no ASCII would shift the columns.
    """
    found = []
    for line in text.split(b"\n"):
        row, at = {}, 0
        for name, width in SQUEUE_FIELDS:
            cell = line[at : at + width].rstrip()
            whole = len(cell) < width or name in _TELL_WHEN_CUT
            # A letter that was cut in the middle is none.
            errors = "replace" if len(cell) < width else "ignore"
            row[name] = cell.decode("utf-8", errors).strip() if whole else ""
            at += width
        if row["JobID"].isdigit():
            found.append(_squeue_record(row))
    return found


def _squeue_record(row: dict[str, str]) -> JobRecord:
    state = parse_state(row["State"])
    record = JobRecord(
        id=row["JobArrayID"] or row["JobID"],
        raw=row["JobID"],
        array=row["ArrayJobID"] if "_" in row["JobArrayID"] else "",
        state=state,
        reason=_word(row["Reason"]),
        nodes=_word(row["NodeList"]),
        restarts=int(row["RestartCnt"]) if row["RestartCnt"].isdigit() else None,
        partition=row["Partition"],
        submitted=parse_time(row["SubmitTime"]),
        start=parse_time(row["StartTime"]),
        end=parse_time(row["EndTime"]),
        name=row["Name"],
        user=_word(row["UserName"]),
        cluster=_word(row["Cluster"]),
    )
    return replace(record, exit_code=parse_exit(row["exit_code"]) if record.ended else None)


def parse_sacct(text: str) -> list[JobRecord]:
    """Rows of ``sacct --parsable2 --duplicates`` with SACCT_FIELDS; the last run of each job.

    ``restarts`` is how many earlier runs of the same job the accounting has kept.
    """
    runs: dict[str, list[JobRecord]] = {}
    for line in text.splitlines():
        cells = line.split("|", len(SACCT_FIELDS) - 1)
        row = dict(zip(SACCT_FIELDS, cells, strict=False))
        if len(cells) == len(SACCT_FIELDS) and job_id(row["JobIDRaw"]):
            runs.setdefault(row["JobID"], []).append(_sacct_record(row))
    found = []
    for many in runs.values():
        *earlier, last = sorted(many, key=lambda one: one.submitted or 0)
        lost = tuple(one for one in earlier if one.state in NODE_FAILURES)
        found.append(replace(last, restarts=len(earlier), lost=lost))
    return found


def _sacct_record(row: dict[str, str]) -> JobRecord:
    array, underscore, _ = row["JobID"].partition("_")
    record = JobRecord(
        id=row["JobID"],
        raw=row["JobIDRaw"],
        array=array if underscore else "",
        state=parse_state(row["State"]),
        nodes="" if row["NodeList"] == "None assigned" else row["NodeList"],
        partition=row["Partition"],
        submitted=parse_time(row["Submit"]),
        start=parse_time(row["Start"]),
        end=parse_time(row["End"]),
        name=row["JobName"],
        user=row["User"],
        cluster=row["Cluster"],
    )
    return replace(record, exit_code=parse_exit(row["ExitCode"]) if record.ended else None)


def by_id(rows: Iterable[JobRecord], ids: Iterable[str]) -> dict[str, JobRecord]:
    """The record of each id of which there is a row; an id may be a job's, an array's, a raw one.

    The raw id of an array's last element is the array's own id, and means the array.
    """
    found = list(rows)
    records = {}
    for wanted in ids:
        # A part of a hetjob stands and falls with its whole.
        base = wanted.partition("+")[0]
        whole = [row for row in found if row.array == base]
        mine = whole or [row for row in found if base in (row.id, row.raw)]
        if mine:
            states = [row.state for row in mine]
            best = min(mine, key=_liveliness)
            counts = tuple(sorted((one, states.count(one)) for one in set(states)))
            records[wanted] = replace(
                best,
                id=wanted,
                raws=tuple(row.raw for row in whole),
                lost=tuple(run for row in mine for run in row.lost),
                elements=counts if whole else (),
            )
    return records


def _liveliness(row: JobRecord) -> tuple[int, int]:
    order = _LIVELIEST.index(row.state) if row.state in _LIVELIEST else len(_LIVELIEST)
    # Of ended elements one that did not end well tells more.
    return order + row.ended, row.state == "COMPLETED"


def parse_nodes(text: str) -> dict[str, NodeRecord]:
    """Lines of ``scontrol --oneliner show node``."""
    found = {}
    for line in text.splitlines():
        name = re.match(r"NodeName=(\S+)", line)
        state = re.search(r" State=(\S+)", line)
        if name and state:
            reason = re.search(r" Reason=(.*?)(?: \[\S+@\S+\])?\s*(?: Comment=.*)?$", line)
            # An old way to say "not responding" is an asterisk.
            word, *flags = state[1].replace("*", "+NOT_RESPONDING").split("+")
            found[name[1]] = NodeRecord(
                name=name[1],
                state=word,
                flags=frozenset(flags),
                reason=reason[1] if reason else "",
            )
    return found


def parse_job_id(text: str) -> tuple[str, str] | None:
    """(job id, cluster or "") of what ``sbatch --parsable`` printed; None if there is none.

    Sites wrap sbatch in scripts that print more; the last line of the right form counts.
    """
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if re.fullmatch(r"[1-9][0-9]*(;[^\s;]+)?", line)]
    number, _, cluster = found[-1].partition(";") if found else ("", "", "")
    return (number, cluster) if found else None


def parse_time(text: str) -> float | None:
    """Epoch seconds of a time printed under ``SLURM_TIME_FORMAT=%s``; None for N/A and the like."""
    return float(text) if re.fullmatch(r"[1-9][0-9]{0,11}", text) else None


def parse_exit(text: str) -> int | None:
    """The exit code in ``code:signal`` (sacct) or in the status of wait(2) (squeue)."""
    if match := re.fullmatch(r"([0-9]{1,5}):([0-9]{1,3})", text):
        return 128 + int(match[2]) if int(match[2]) else int(match[1])
    if not re.fullmatch(r"[0-9]{1,6}", text):
        return None
    code, signal = divmod(int(text), 256)
    return 128 + signal % 128 if signal % 128 else code


def _word(text: str) -> str:
    return "" if text in ("(null)", "None", "N/A") else text
