"""Parse the output of Slurm's programs and the options of scripts. Runs no program.

The states are those of squeue(1) and sacct(1), JOB STATE CODES. A state that this version does not
know is kept; such a job is neither ended, waiting nor running.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable

from hpc_toolkit.system.record import Record, replace

UNKNOWN = "unknown"
"""The state of a job that Slurm said nothing about; not a failure."""

NODE_FAILURES = frozenset({"NODE_FAIL", "BOOT_FAIL"})
"""States of jobs that ended because a node failed."""

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "TIMEOUT"),
}
_WAITING = {
    *("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
}
_ON_NODES = {
    *("RUNNING", "COMPLETING", "CONFIGURING", "POWER_UP_NODE", "RESIZING", "SIGNALING"),
    *("STAGE_OUT", "STOPPED", "SUSPENDED", "UPDATE_DB", "EXPEDITING"),
}

# An array has the first of these states that one of its elements is in.
_LIVELIEST = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "PENDING")

SQUEUE_FIELDS = (
    ("JobID", 24),
    ("JobArrayID", 48),
    ("State", 24),
    ("RestartCnt", 12),
    ("exit_code", 16),
    ("SubmitTime", 24),
    ("StartTime", 24),
    ("EndTime", 24),
    ("Reason", 256),
    ("NodeList", 1024),
    ("Name", 256),
    ("UserName", 64),
    ("Cluster", 64),
)
"""Columns of ``squeue --Format`` and their widths in bytes; squeue truncates longer values."""
_TELL_WHEN_CUT = {"Reason", "Name"}

_PAIR = re.compile(r"(?:^|\s)([A-Za-z][\w/:]*)=(\S*)")
_FREE_TEXT = re.compile(r"\s(?:Reason|Comment|Extra)=")
_LETTERS = {
    "a": "array",
    "c": "cpus-per-task",
    "D": "chdir",
    "F": "nodefile",
    "G": "gpus",
    "J": "job-name",
    "M": "clusters",
    "m": "distribution",
    "o": "output",
    "w": "nodelist",
    "x": "exclude",
}
"""Long names of the one-letter options of sbatch that are read from scripts."""

SACCT_FIELDS = {
    "JobIDRaw": "JobID",
    "JobID": "JobArrayID",
    "State": "State",
    "ExitCode": "exit_code",
    "Submit": "SubmitTime",
    "Start": "StartTime",
    "End": "EndTime",
    "NodeList": "NodeList",
    "User": "UserName",
    "Cluster": "Cluster",
    "JobName": "Name",
}
"""Columns of ``sacct --parsable2``, and squeue's names for them; the name is last because it may
contain the delimiter."""


class JobRecord(Record, kw_only=True):
    """One job as Slurm sees it; for the id of an array, its most active element."""

    id: str
    """The requested id: ``123``, or ``123_4`` for element 4 of an array."""
    state: str
    reason: str = ""
    """Slurm's reason why the job waits or ended; for an unknown job, why nothing is known."""
    nodes: str = ""
    """Its nodes in Slurm's notation ``n[1-4]``; "" if it has none or the list is too long."""
    restarts: int | None = None
    """How often the job was requeued; None if Slurm did not say."""
    submitted: float | None = None
    """Epoch seconds of the submission, or of the last requeue."""
    start: float | None = None
    """Epoch seconds of the start, expected by Slurm if the job waits; None if unknown."""
    end: float | None = None
    """Epoch seconds of the end, or of the time limit while it runs; None if unknown."""
    exit_code: int | None = None
    """Exit code of an ended job's script, or 128 plus the number of the signal that ended it."""
    name: str = ""
    """The job's name; only its beginning if it has 256 bytes or more."""
    user: str = ""
    """Login name of its user; "" if Slurm did not say."""
    cluster: str = ""
    """The cluster that answered; "" if it did not say."""
    array: str = ""
    """Id of the array that it is an element of; "" for other jobs."""
    raw: str = ""
    """SLURM_JOB_ID inside the job; differs from ``id`` in arrays."""
    lost: tuple[JobRecord, ...] = ()
    """Earlier runs of the job that a node's failure ended; known from the accounting only."""
    elements: tuple[tuple[str, int], ...] = ()
    """For the id of an array: each state and the number of elements in it."""

    @property
    def ended(self) -> bool:
        """Whether the job is over, and no process of it will start again."""
        return self.state in _ENDED

    @property
    def waiting(self) -> bool:
        """Whether the job is in the queue and has no nodes."""
        return self.state in _WAITING

    @property
    def running(self) -> bool:
        return self.state in _ON_NODES


class NodeRecord(Record, kw_only=True):
    name: str
    state: str
    """The base state: ``IDLE``, ``ALLOCATED``, ``MIXED``, ``DOWN``, ..., or ``unknown``."""
    flags: frozenset[str] = frozenset()
    """Flags such as ``DRAIN``, ``NOT_RESPONDING``, ``FAIL``, ``REBOOT_ISSUED``."""

    @property
    def failed(self) -> bool:
        """Whether Slurm considers the node broken: down, failing or not responding."""
        return self.state == "DOWN" or bool(self.flags & {"FAIL", "FAILING", "NOT_RESPONDING"})


def job_id(text: str) -> bool:
    """Return whether ``text`` is the id of a job, an array element or a hetjob component."""
    return re.fullmatch(r"[1-9][0-9]{0,18}([_+][0-9]{1,9})?", text) is not None


def parse_squeue(text: bytes) -> list[JobRecord]:
    """Parse ``squeue --noheader --array --Format=...`` with SQUEUE_FIELDS; skip other lines.

    Columns are split by bytes, because squeue pads by bytes: counted in characters, the columns
    after a non-ASCII name would shift.
    """
    found = []
    for line in text.split(b"\n"):
        row, at = {}, 0
        for name, width in SQUEUE_FIELDS:
            cell = line[at : at + width].rstrip()
            whole = len(cell) < width or name in _TELL_WHEN_CUT
            # Drop a multi-byte character that squeue cut in two.
            errors = "replace" if len(cell) < width else "ignore"
            row[name] = cell.decode("utf-8", errors).strip() if whole else ""
            at += width
        if row["JobID"].isdigit():
            found.append(_record(row))
    return found


def _record(row: dict[str, str]) -> JobRecord:
    """Build a record from cells by squeue's names."""
    number = row["JobArrayID"] or row["JobID"]
    array, underscore, _ = number.partition("_")
    restarts = row.get("RestartCnt", "")
    record = JobRecord(
        id=number,
        raw=row["JobID"],
        array=array if underscore else "",
        # sacct writes "CANCELLED by 1000".
        state=row["State"].strip().partition(" ")[0].upper() or UNKNOWN,
        reason=_word(row.get("Reason", "")),
        nodes=_word(row["NodeList"]),
        restarts=int(restarts) if restarts.isdigit() else None,
        submitted=parse_time(row["SubmitTime"]),
        start=parse_time(row["StartTime"]),
        end=parse_time(row["EndTime"]),
        name=row["Name"],
        user=_word(row["UserName"]),
        cluster=_word(row["Cluster"]),
    )
    return replace(record, exit_code=parse_exit(row["exit_code"]) if record.ended else None)


def parse_sacct(text: str) -> list[JobRecord]:
    """Parse ``sacct --parsable2 --duplicates`` with SACCT_FIELDS into the last run of each job.

    ``restarts`` counts the earlier runs of the job that the accounting has kept.
    """
    runs: dict[str, list[JobRecord]] = {}
    for line in text.splitlines():
        cells = line.split("|", len(SACCT_FIELDS) - 1)
        row = dict(zip(SACCT_FIELDS.values(), cells, strict=False))
        if len(cells) == len(SACCT_FIELDS) and job_id(row["JobID"]):
            runs.setdefault(row["JobArrayID"], []).append(_record(row))
    found = []
    for many in runs.values():
        *earlier, last = sorted(many, key=lambda one: one.submitted or 0)
        lost = tuple(one for one in earlier if one.state in NODE_FAILURES)
        found.append(replace(last, restarts=len(earlier), lost=lost))
    return found


def by_id(rows: Iterable[JobRecord], ids: Iterable[str]) -> dict[str, JobRecord]:
    """Map ids to their records; an id may be that of a job, an array or an element, or a raw id.

    Ids without a row have no entry. An array's last element has the array's id as its raw id; that
    id means the array.
    """
    found = list(rows)
    records = {}
    for wanted in ids:
        # The components of a hetjob start and end together.
        base = wanted.partition("+")[0]
        whole = [row for row in found if row.array == base]
        if mine := whole or [row for row in found if base in (row.id, row.raw)]:
            records[wanted] = replace(
                min(mine, key=_liveliness),
                id=wanted,
                lost=tuple(run for row in mine for run in row.lost),
                elements=tuple(sorted(Counter(row.state for row in whole).items())),
            )
    return records


def _liveliness(row: JobRecord) -> tuple[int, int]:
    order = _LIVELIEST.index(row.state) if row.state in _LIVELIEST else len(_LIVELIEST)
    # Among ended elements prefer one that did not complete.
    return order + row.ended, row.state == "COMPLETED"


def parse_records(text: str) -> tuple[dict[str, str], ...]:
    """Parse each line of ``scontrol --oneliner show partition`` or ``node`` into a mapping.

    A value ends at its first space. If a key occurs twice, the first one counts. Nothing is read
    from free text, which comes last, may contain anything, and may continue on further lines.
    """
    lines = (line for line in text.splitlines() if line.startswith(("NodeName=", "PartitionName=")))
    return tuple(
        dict(reversed(_PAIR.findall(_FREE_TEXT.split(line, maxsplit=1)[0]))) for line in lines
    )


def parse_nodes(text: str) -> dict[str, NodeRecord]:
    found = {}
    for row in parse_records(text):
        if "NodeName" in row and row.get("State"):
            # Older versions of Slurm mark a node that does not respond with an asterisk.
            state, *flags = row["State"].replace("*", "+NOT_RESPONDING").split("+")
            name = row["NodeName"]
            found[name] = NodeRecord(name=name, state=state, flags=frozenset(flags))
    return found


def parse_job_id(text: str) -> tuple[str, str] | None:
    """Return (job id, cluster or "") from the output of ``sbatch --parsable``, or None.

    Sites wrap sbatch in scripts that print more, so the last line of the right form counts.
    """
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if re.fullmatch(r"[1-9][0-9]*(;[^\s;]+)?", line)]
    number, _, cluster = found[-1].partition(";") if found else ("", "", "")
    return (number, cluster) if found else None


def script_options(script: str) -> dict[str, str]:
    """Return the options of a script's ``#SBATCH`` lines by long name, "" without a value.

    Like sbatch, it reads up to the first command. Letters that hpctk does not use stay letters.
    """
    found: dict[str, str] = {}
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        directive = re.match(r"#SBATCH[ \t](.*)", line)
        if directive is None:
            continue
        try:
            words = shlex.split(directive[1], comments=True)
        except ValueError:
            words = directive[1].split()
        name = ""
        for word in words:
            if long := re.fullmatch(r"--([a-z-]+)(?:=(.*))?", word):
                name = long[1]
                found[name] = long[2] or ""
            elif short := re.fullmatch(r"-([A-Za-z])(.*)", word):
                name = _LETTERS.get(short[1], short[1])
                found[name] = short[2]
            elif name and not found[name]:
                found[name] = word
    return found


def parse_time(text: str) -> float | None:
    """Parse a time of ``SLURM_TIME_FORMAT=%s``: epoch seconds; None for N/A and similar words."""
    return float(text) if re.fullmatch(r"[1-9][0-9]{0,11}", text) else None


def parse_exit(text: str) -> int | None:
    """Parse ``code:signal`` (sacct) or a status of wait(2) (squeue) into an exit code, or None."""
    if match := re.fullmatch(r"([0-9]{1,5}):([0-9]{1,3})", text):
        return 128 + int(match[2]) if int(match[2]) else int(match[1])
    if not re.fullmatch(r"[0-9]{1,6}", text):
        return None
    code, signal = divmod(int(text), 256)
    return 128 + signal % 128 if signal % 128 else code


def _word(text: str) -> str:
    return "" if text in ("(null)", "None", "N/A", "None assigned") else text
