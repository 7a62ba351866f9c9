"""The Slurm jobs of a run or a training: records of what was submitted, and their states.

The records are annotations in the run directory; no decision about items depends on them. Of jobs
that are kept in the queue, ``jobs/keep-NAME.json`` is what a user requested; only the user's own
commands write it. Only the process whose turn it is submits jobs of this name, and then writes
``keep-NAME.state``. The turn is a name that one process can create, ``keep-NAME.7``. It ends when
the state has its number.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.queue.presence import Presence, read_presence
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.files import share
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.records import UNKNOWN, JobRecord, job_id
from hpc_toolkit.system.ranks import boot_id, host_name, noted_name, process_ticks
from hpc_toolkit.system.record import Record, asdict, replace

if TYPE_CHECKING:
    from hpc_toolkit.results.sums import Efficiency

FORMAT = 1
ASKED_AGAIN_S = 30.0
"""Seconds for which an answer of Slurm is used before Slurm is asked again."""
_CONTRADICTED = "another job has this id, or it was renamed"
_MOST_ASKED = 50
_PATIENCE_S = 5.0
_SETTLED_S = 300.0


class RunJob(Record, kw_only=True):
    """One job of a run; of a submitted one, the content of ``jobs/<job>.json``."""

    job: str
    """Its id; for an array, the id of the array."""
    cluster: str = ""
    """The cluster that sbatch named; "" if it named none."""
    name: str = ""
    array: str | None = None
    script: str = ""
    """The submitted copy of its script, relative to the run."""
    argv: tuple[str, ...] = ()
    cwd: str = ""
    """The job's directory."""
    log: str = ""
    """Its log in sbatch's notation, relative to ``cwd``."""
    excluded: tuple[str, ...] = ()
    submitted: float = 0.0
    """Epoch seconds of its submission or of its first worker, for display and to sort by."""
    by: str = ""
    recorded: bool = True
    """Whether its submission was recorded; False for a job that only its workers name."""
    place: str = ""
    """The cluster that its workers name if nothing else does; "" if unknown."""

    def contradicts(self, record: JobRecord, *, user: str = "") -> str:
        """Why ``record`` is of another job with the same id; "" if nothing indicates that.

        A reinstalled cluster gives the same ids again, and so does another cluster that shares the
        filesystem. ``user`` must own the job if no submission was recorded. A renamed job cannot
        be told from a foreign one, because nothing else shows that an id is ours.
        """
        user = self.by or user
        if self.place and record.cluster not in ("", self.place):
            return f"this is a job of cluster {record.cluster}, not {self.place}"
        if user and record.user not in ("", user):
            return f"it is {record.user}'s"
        if self.name and record.name and noted_name(record.name) != noted_name(self.name):
            return f"it is called {record.name}, not {self.name}; if it was renamed, {self.by_hand}"
        return ""

    @property
    def by_hand(self) -> str:
        """A phrase that says how its user can cancel it without hpctk."""
        on = f"--clusters={self.cluster} " if self.cluster else ""
        return f"'scancel {on}{self.job}' takes it"


def own_login() -> str:
    """The login name of this process's user as Slurm prints it; the uid if there is no name.

    Environment variables are not used, because they stay when the user changes.
    """
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def script_copy(paths: RunPaths, name: str, script: str) -> Path:
    """Path of the run's copy of a script; equal scripts share one."""
    from hpc_toolkit.slurm.render.file import sha256
    from hpc_toolkit.slurm.render.values import file_name

    return paths.jobs / f"{file_name(name)[:64]}-{sha256(script)[:12]}.sbatch"


def keep_script(paths: RunPaths, name: str, script: str) -> Path:
    path = script_copy(paths, name, script)
    # The directory of a training may not exist yet.
    paths.jobs.mkdir(parents=True, exist_ok=True)
    share(paths.jobs)
    if files.read_fresh(path) != script.encode():
        files.replace_file(path, [script.encode()])
    return path


def record_job(paths: RunPaths, job: RunJob) -> None:
    """Record a submitted job; if that fails, print a warning, because the job will run anyway."""
    data = (json.dumps({"format": FORMAT, **asdict(job)}) + "\n").encode()
    try:
        paths.jobs.mkdir(exist_ok=True)
        share(paths.jobs)
        try:
            files.write_new(paths.jobs / f"{job.job}.json", [data])
        except FileExistsError:
            # A reinstalled cluster counts job ids from the start again.
            files.write_new(paths.jobs / f"{job.job}-{os.urandom(2).hex()}.json", [data])
    except OSError as error:
        sys.stderr.write(f"warning: job {job.job} is not noted in {paths.jobs}: {error}\n")


def read_jobs(paths: RunPaths) -> list[RunJob]:
    """Jobs that were submitted for this run, oldest first; unreadable records are skipped."""
    found = []
    for name in files.list_names(paths.jobs):
        if name.endswith(".json") and not name.startswith("."):
            job = read_job(paths.jobs / name)
            found += [job] if job is not None else []
    return sorted(found, key=_age)


def _age(job: RunJob) -> tuple[float, int, str]:
    return job.submitted, len(job.job), job.job


def read_job(path: Path) -> RunJob | None:
    """One record of a submitted job; None if it cannot be read."""
    try:
        record: dict[str, Any] = json.loads(files.read_fresh(path))
        values = {key: record[key] for key in RunJob.fields if key in record}
        for key in ("argv", "excluded"):
            values[key] = tuple(str(word) for word in values.get(key, ()))
        job = RunJob(**values)
        usable = job_id(job.job) and re.fullmatch(r"[\w.-]*", job.cluster) is not None
        return replace(job, submitted=float(job.submitted)) if usable else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def known_jobs(paths: RunPaths) -> list[RunJob]:
    """The Slurm jobs that the run's own files name, oldest first."""
    jobs = {(job.job, job.cluster): job for job in read_jobs(paths)}
    named = {job for job, _ in jobs}
    workers: dict[str, list[Presence]] = {}
    names = filter(lambda name: name.endswith(".json"), files.list_names(paths.workers))
    for presence in (read_presence(paths.workers / name) for name in names):
        if presence is not None and presence.job is not None and presence.job not in named:
            workers.setdefault(presence.job, []).append(presence)
    for job in filter(job_id, workers):
        started = sorted(workers[job], key=lambda presence: presence.started)
        jobs[job, ""] = RunJob(
            job=job,
            name=started[-1].job_name,
            submitted=started[0].started,
            recorded=False,
            place=started[-1].cluster,
        )
    return sorted(jobs.values(), key=_age)


class JobStates:
    """States of a run's jobs; Slurm is asked at most once in 30 s."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._ended: dict[tuple[str, str], JobRecord] = {}
        self._records: list[JobRecord] = []
        self._asked = float("-inf")

    def read(self, *, ask: bool = True) -> list[JobRecord]:
        """One record for every job, oldest first; asks Slurm at most once in 30 s.

        Never raises because of Slurm, and takes 5 s at most; a job without an answer is
        ``unknown``. Slurm is not asked again about jobs that ended more than 300 s ago. Of more
        than 50 other jobs only the newest are queried, and submitted jobs go before jobs that only
        workers name.
        """
        now = time.monotonic()
        if now - self._asked < ASKED_AGAIN_S:
            return self._records
        self._asked = now
        jobs = without_elements(known_jobs(self._paths))
        answers = dict(self._ended)
        if ask:
            open_jobs = [job for job in jobs if (job.job, job.cluster) not in self._ended]
            open_jobs.sort(key=lambda job: job.recorded)  # each part oldest first
            answers |= _ask(open_jobs[-_MOST_ASKED:], now + _PATIENCE_S)
        self._ended |= {key: record for key, record in answers.items() if _settled(record)}
        why = "only the newest jobs are queried" if ask else "Slurm was not queried"
        self._records = [_answer(job, answers.get((job.job, job.cluster)), why) for job in jobs]
        return self._records


def without_elements(jobs: list[RunJob]) -> list[RunJob]:
    """Leave out the elements of submitted arrays, which workers name: the array stands for them."""
    arrays = {job.job for job in jobs if job.recorded}
    return [job for job in jobs if job.job.partition("_")[0] not in arrays - {job.job}]


def _answer(job: RunJob, record: JobRecord | None, why: str) -> JobRecord:
    if record is not None and not job.contradicts(record):
        return record
    reason = why if record is None else _CONTRADICTED
    return JobRecord(id=job.job, state=UNKNOWN, reason=reason)


def _settled(record: JobRecord) -> bool:
    # A job whose node failed is shown as ended for a moment before it is requeued.
    return record.ended and record.end is not None and time.time() - record.end > _SETTLED_S


def _ask(jobs: list[RunJob], until: float) -> dict[tuple[str, str], JobRecord]:
    if not jobs:
        return {}
    from hpc_toolkit.slurm.client import job_states

    found = {}
    for cluster in dict.fromkeys(job.cluster for job in jobs):
        ids = [job.job for job in jobs if job.cluster == cluster]
        since = min((job.submitted for job in jobs if job.submitted > 0), default=None)
        left_s = max(0.0, until - time.monotonic())
        states = job_states(ids, cluster=cluster, since=since, timeout_s=left_s)
        for one, record in states.items():
            found[one, cluster] = record
    return found


def log_files(paths: RunPaths, wanted: str) -> list[Path]:
    """The existing logs of a job, by its record, or else by what Slurm knows of it; sorted.

    Raises SlurmError: the job has no record here, and Slurm does not answer or has forgotten it.
    """
    records = [job for job in read_jobs(paths) if job.job == wanted.partition("_")[0] and job.log]
    if records:
        job = records[-1]
        return sorted(_expand(Path(job.cwd), job, wanted))
    from hpc_toolkit.slurm.controller import job_outputs

    return sorted({path for path in map(Path, job_outputs(wanted)) if path.is_file()})


def _expand(cwd: Path, job: RunJob, wanted: str) -> set[Path]:
    """Files that match the log's pattern; a field that only Slurm knows matches anything."""
    import glob

    _, _, element = wanted.partition("_")
    known = {"x": job.name, "j": job.job, "A": job.job, "u": job.by, "a": element}
    if job.array is not None and "%A" not in job.log:
        known.pop("j")

    def fill(match: re.Match[str]) -> str:
        if match[2] == "%":
            return "%"
        text = known.get(match[2], "")
        return glob.escape(text.zfill(int(match[1] or 0)) if text.isdigit() else text) or "*"

    pattern = re.sub(r"%([0-9]*)([A-Za-z%])", fill, glob.escape(job.log))
    return {path for path in map(cwd.joinpath, glob.glob(pattern, root_dir=cwd)) if path.is_file()}


_LONGEST_TURN_S = 600.0
"""After this time the process that has the turn counts as lost; sbatch is tried for 120 s."""


class Kept:
    """The files of the kept jobs of one name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = path.with_suffix(".state")
        self._turn = 0

    def read(self) -> dict[str, Any]:
        """What was requested, with the state; {} if nothing was, or it cannot be read.

        ``ended``: why no more jobs are sent; ``turn``: the last turn that has ended; ``failed``:
        how many submissions in a row failed; ``sent``: jobs that may be in the queue.
        """
        request, state = _read_kept(self.path), _read_kept(self._state)
        if request.get("format") != FORMAT or "ended" not in request:
            return {}
        if state.get("started") != request.get("started"):  # of an earlier request
            state = {key: state[key] for key in ("turn", "sent") if key in state}
        ended = request["ended"] or state.get("ended", "")
        return {"turn": 0, "failed": 0, "sent": [], **state, **request, "ended": ended}

    def request(self, **facts: Any) -> None:
        """Write what a user requests."""
        self.path.parent.mkdir(exist_ok=True)
        share(self.path.parent)
        _write_kept(self.path, {"format": FORMAT, **_read_kept(self.path), **facts})

    def take_turn(self) -> bool:
        """Begin a turn, which :meth:`end_turn` ends; False if another process has it."""
        this = os.getpid()
        own = f"{host_name()}:{boot_id()}:{this}:{process_ticks(this)}:{os.urandom(4).hex()}"
        number = int(self.read().get("turn", 0))
        while True:
            number += 1
            name = self.path.with_suffix(f".{number}")
            holder = files.create_name(name, own)
            if holder == own:
                self._turn = number
                return True
            if not self._is_lost(name, holder):
                return False

    def end_turn(self, **state: Any) -> None:
        """Write what came of the turn, and let others have the next one."""
        _write_kept(self._state, {**state, "turn": self._turn})

    def _is_lost(self, name: Path, holder: str) -> bool:
        """Whether the process that has a turn, or had it, is not going to submit any more."""
        *where, pid, ticks, _ = holder.split(":")
        if where == [host_name(), boot_id()]:
            return process_ticks(int(pid)) != int(ticks)
        os.utime(self.path)  # both times are those of the file server
        return self.path.stat().st_mtime - name.lstat().st_mtime > _LONGEST_TURN_S


def _read_kept(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(files.read_fresh(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_kept(path: Path, record: dict[str, Any]) -> None:
    files.replace_file(path, [json.dumps(record).encode() + b"\n"])


def kept_jobs(paths: RunPaths) -> list[tuple[Kept, dict[str, Any]]]:
    """What is kept for a run, by name, each with what :meth:`Kept.read` returns."""
    names = sorted(files.list_names(paths.jobs))
    found = [
        Kept(paths.jobs / name)
        for name in names
        if name.startswith("keep-") and name.endswith(".json")
    ]
    return [(one, record) for one in found if (record := one.read())]


def used_by(paths: RunPaths, *, ask: bool = True) -> Efficiency | None:
    """What the ended jobs of a run used; None if nothing was measured.

    ``ask``: ask the accounting about the newest 50 jobs. Raises nothing because of Slurm.
    """
    from hpc_toolkit.results.sums import FIELDS, efficiency, read_loads

    by_cluster: dict[str, list[str]] = {}
    for job in known_jobs(paths)[-_MOST_ASKED:] if ask else ():
        by_cluster.setdefault(job.cluster, []).append(job.job)
    accounts = ""
    if by_cluster:
        # Runs without jobs do without Slurm's client, which takes long to import.
        from hpc_toolkit.slurm.client import sacct_text

        for cluster, ids in by_cluster.items():
            accounts += sacct_text(ids, FIELDS, cluster=cluster)
    with suppress(OSError):
        return efficiency(accounts, read_loads(paths))
    return None
