"""Identity of this process: host, boot, job and rank, read from the environment.

The jobs are those of Slurm, PBS, LSF, Grid Engine and Flux.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.quantities import parse_duration
from hpc_toolkit.system.record import Record, replace

_LONGEST_NAME = 386
_OF_A_RANK = re.compile(
    "((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*)"
)


class RankInfo(Record, kw_only=True):
    """Job and rank of one process, in torch.distributed's terms."""

    rank: int = 0
    """Number of the process in the job, from 0 (SLURM_PROCID, RANK)."""
    local_rank: int = 0
    """Number of the process on its node, from 0 (SLURM_LOCALID, LOCAL_RANK)."""
    world_size: int = 1
    """Number of processes of the job (SLURM_NTASKS, WORLD_SIZE)."""
    job_id: str | None = None
    """Slurm job id, ``ARRAY_INDEX`` for an array task; ``pbs:ID`` and the like for jobs of other
    schedulers; None outside a job."""
    job_name: str = ""
    """The job's name, cut by :func:`noted_name`."""
    cluster: str = ""
    """Name of the job's Slurm cluster (SLURM_CLUSTER_NAME)."""
    restart: int = 0
    """How often Slurm restarted this job (SLURM_RESTART_COUNT, unset at first)."""
    in_step: bool = False
    """Whether srun, or a launcher in a job of another scheduler, started this process; it is then
    one rank, not a pool of ranks."""

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str] = os.environ, *, others: bool = True
    ) -> RankInfo:
        """Read srun's variables, else torchrun's, else assume a single process.

        ``others``: read those of MPI and Flux in jobs of other schedulers.
        ``SLURM_PROCID`` is also set in a batch script outside any step, where it means nothing;
        only ``SLURM_STEP_ID`` shows that srun started this process.
        """
        job_id = environ.get("SLURM_JOB_ID")
        of_job: Mapping[str, str] = environ if job_id is not None else {}
        array, index = (environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
        if job_id is not None and array is not None and index is not None:
            # The last array task's own job id equals the array's job id.
            job_id = f"{array}_{index}"
        other = other_job(environ) if others else None
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        if in_step(environ):
            names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        elif other is not None and other.rank is not None:
            names = (other.rank.rank, other.rank.local_rank, other.rank.size)
        rank, local_rank, world_size = (_number(environ.get(name)) for name in names)
        return cls(
            rank=rank or 0,
            local_rank=local_rank or 0,
            world_size=world_size or 1,
            job_id=other.id if other is not None else job_id,
            job_name=noted_name(other.title if other else of_job.get("SLURM_JOB_NAME", "")),
            cluster=of_job.get("SLURM_CLUSTER_NAME", ""),
            restart=_number(environ.get("SLURM_RESTART_COUNT")) or 0,
            in_step=names[0] != "RANK",
        )

    def one_of(self, workers: int, slot: int) -> RankInfo:
        """Worker number ``slot`` of the ``workers`` that this rank starts."""
        return replace(
            self,
            rank=self.rank * workers + slot,
            local_rank=self.local_rank * workers + slot,
            world_size=self.world_size * workers,
        )


_TIME = r"(?:\d+[-:])*\d+"
_PATIENCE_S = 20.0
"""Seconds to wait for the answer of a scheduler's command."""


class LauncherNames(Record):
    """The variables of one launcher: rank and size in the job and on the node."""

    rank: str
    local_rank: str
    size: str
    local_size: str


def _prefixed(prefix: str) -> LauncherNames:
    names = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
    return LauncherNames(*(f"{prefix}_{name}" for name in names))


_MPI = (
    _prefixed("OMPI_COMM_WORLD"),
    LauncherNames("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
    _prefixed("JSM_NAMESPACE"),
)
"""Open MPI; MPICH, Intel MPI and PALS; jsrun of LSF."""
_FLUX = LauncherNames("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE", "")


class Scheduler(Record):
    """The variables of a scheduler other than Slurm; "" where it has none."""

    name: str
    sign: str
    """Set in its jobs and in no others."""
    job: str
    element: str
    """The element of an array; 0, "undefined" or unset for other jobs."""
    title: str
    hosts: str
    """A file with a host at the start of each line, or words of hosts and their slots."""
    starter: str = "mpiexec"
    """What starts one process per slot on all hosts."""
    ranks: tuple[LauncherNames, ...] = _MPI


SCHEDULERS = (
    Scheduler("pbs", "PBS_JOBID", "PBS_JOBID", "", "PBS_JOBNAME", "PBS_NODEFILE"),
    Scheduler("lsf", "LSB_JOBID", "LSB_JOBID", "LSB_JOBINDEX", "LSB_JOBNAME", "LSB_MCPU_HOSTS"),
    Scheduler("sge", "SGE_TASK_ID", "JOB_ID", "SGE_TASK_ID", "JOB_NAME", "PE_HOSTFILE"),
    Scheduler("flux", "FLUX_JOB_ID", "FLUX_JOB_ID", "", "", "", "flux run", (_FLUX, *_MPI)),
)


class OtherJob(Record):
    """A job of one of these schedulers, as one of its processes sees it."""

    scheduler: Scheduler
    number: str
    """The job's id for the scheduler's commands."""
    element: str
    """The index of an element of an array; "" for another job."""
    title: str
    rank: LauncherNames | None
    """The variables of this rank; None outside a parallel start, as in the job's script."""

    @property
    def id(self) -> str:
        """The id in files of a run, such as ``lsf:17[3]``; Slurm is never asked about it."""
        number = self.number.partition(".")[0] + (f"[{self.element}]" if self.element else "")
        return f"{self.scheduler.name}:{number}"[:64]


def other_job(environ: Mapping[str, str]) -> OtherJob | None:
    """The job of this process in a scheduler other than Slurm; None if it is in none.

    A job of Flux within a job of another scheduler is Flux's.
    """
    for one in reversed(SCHEDULERS) if "SLURM_JOB_ID" not in environ else ():
        number = environ.get(one.job, "")
        if number and environ.get(one.sign):
            index = environ.get(one.element, "")
            return OtherJob(
                one,
                number,
                index if index.isdigit() and int(index) else "",
                environ.get(one.title, ""),
                next((names for names in one.ranks if environ.get(names.rank, "").isdigit()), None),
            )
    return None


def other_hosts(environ: Mapping[str, str]) -> tuple[int, str]:
    """The number of hosts of this process's job in a scheduler other than Slurm, 0 if it is not
    known, and what starts a process on each of them."""
    job = other_job(environ)
    hosts = job_hosts(environ) if "SLURM_JOB_ID" not in environ else []
    return len(hosts), job.scheduler.starter if job else "flux run"


def job_hosts(environ: Mapping[str, str]) -> list[str]:
    """The hosts of this process's job, in the scheduler's order; empty if they are not listed.

    PBS and Grid Engine list them in a file, which may exist on the first host only. Flux is asked
    (flux-hostlist(1)), also by its batch scripts, which FLUX_URI alone shows.
    """
    job = other_job(environ)
    if job.scheduler.name == "flux" if job is not None else "FLUX_URI" in environ:
        return list(dict.fromkeys(answer("flux", "hostlist", "--expand", "local").split()))
    value = environ.get(job.scheduler.hosts, "") if job is not None else ""
    if not value.startswith("/"):
        return list(dict.fromkeys(value.split()[::2]))
    lines: list[str] = []
    with suppress(OSError, UnicodeDecodeError):
        lines = Path(value).read_text(encoding="utf-8").splitlines()
    return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))


def answer(*argv: str) -> str:
    """What a scheduler's command prints; "" if there is none, or no answer in time."""
    import subprocess  # most processes ask nobody

    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_PATIENCE_S,
            env={**os.environ, "LC_ALL": "C"},
        )
        return done.stdout.decode(errors="replace")
    return ""


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task, and not salloc as its shell on a node."""
    number = _number(environ.get("SLURM_STEP_ID"))
    # Slurm's own steps have the numbers from 0xfffffff0 (slurm.h).
    return number is not None and number < 0xFFFFFFF0


def step_nodes(environ: Mapping[str, str] = os.environ) -> int:
    """Nodes on which items of this process may start steps: all, unless others share the job."""
    alone = not in_step(environ) or environ.get("SLURM_STEP_NUM_TASKS") == "1"
    return (_number(environ.get("SLURM_JOB_NUM_NODES")) or 1) if alone else 1


def of_slurm(job: str | None) -> bool:
    """Whether a worker's job is one about which Slurm can be asked."""
    return job is not None and ":" not in job


def task_counts(text: str) -> list[int]:
    """Parse the tasks of each node in Slurm's notation: ``2(x3),1`` is [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def noted_name(name: str) -> str:
    """Cut a job's name to what fits into a worker's file, whose first line has a fixed length."""
    name = name[:64]
    while len(json.dumps(name)) > _LONGEST_NAME:
        name = name[:-1]
    return name


def without_rank(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environ`` without the variables by which torchrun, and hpctk, describe a rank to itself.

    A rank or an item that starts workers or submits a job passes on its environment, in which its
    own number, world and address would be wrong.
    """
    return {name: text for name, text in environ.items() if not _OF_A_RANK.fullmatch(name)}


def environment_of_items(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process in which the items of this worker run.

    To accelerate and others, a process with LOCAL_RANK waits for the other ranks of a training.
    """
    own = {"HPCTK_LOCAL_RANK": environ["LOCAL_RANK"]} if "LOCAL_RANK" in environ else {}
    return without_rank(environ) | own


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """This host's name: HPCTK_HOST, else Slurm's name of the node, else the kernel's.

    Two processes with the same host name and boot id share a kernel, so locks between them can be
    trusted. HPCTK_HOST lets one machine act as several hosts.
    """
    return environ.get("HPCTK_HOST") or environ.get("SLURMD_NODENAME") or os.uname().nodename


def boot_id() -> str:
    """The kernel's id of this boot; "" if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def process_ticks(pid: int) -> int:
    """When a process of this host started, in clock ticks since the boot; 0 if it is gone.

    Field 22 of /proc/PID/stat (proc(5)); a zombie counts as gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()
        return 0 if fields[0] == "Z" else int(fields[19])
    except (OSError, IndexError):
        return 0


def process_id(pid: int) -> list[int]:
    """What identifies a process of this host and boot: its id, its start, and the ids' namespace.

    The second number is that of :func:`process_ticks`; the third is the inode of the PID namespace
    in which this process sees it. Two containers of one host may have the same names and boot id.
    """
    return [pid, process_ticks(pid), os.stat("/proc/self/ns/pid").st_ino]


def job_end(environ: Mapping[str, str] = os.environ) -> float | None:
    """The end of this process's job, in epoch seconds; None if it is unknown or has no limit.

    It is read from the variables, files or commands of a scheduler other than Slurm. A command that
    is missing or does not answer means that the end is unknown.
    """
    job = other_job(environ)
    if job is None:
        return None
    found = _ENDS[job.scheduler.name](job, environ)
    return found if found is not None and found > 0 else None


def _pbs(job: OtherJob, environ: Mapping[str, str]) -> float | None:
    limit_s = _seconds(environ.get("PBS_WALLTIME", ""))
    # The file is written when the job starts.
    started = _written(environ.get("PBS_NODEFILE", ""))
    if limit_s and started:
        return started + limit_s
    text = answer("qstat", "-f", job.number)
    left_s = _seconds(_value(text, rf"Walltime\.Remaining = ({_TIME})$"))
    if left_s is not None:
        return time.time() + left_s
    limit_s = limit_s or _seconds(_value(text, rf"Resource_List\.walltime = ({_TIME})$"))
    used_s = _seconds(_value(text, rf"resources_used\.walltime = ({_TIME})$"))
    with suppress(ValueError):
        started = time.mktime(time.strptime(_value(text, r"\bstime = (.+)$")))
    if limit_s is None:
        return None
    return started + limit_s if started else time.time() + limit_s - (used_s or 0.0)


def _lsf(job: OtherJob, _: Mapping[str, str]) -> float | None:
    name = f"{job.number}[{job.element}]" if job.element else job.number
    # Hours and minutes, and L for a limit; E is an estimate.
    text = answer("bjobs", "-noheader", "-o", "time_left", name)
    left = re.search(r"(?m)^(\d+):(\d+) L\b", text)
    return time.time() + 3600 * int(left[1]) + 60 * int(left[2]) if left else None


def _sge(job: OtherJob, environ: Mapping[str, str]) -> float | None:
    settings = Path(environ.get("SGE_JOB_SPOOL_DIR", "/nowhere"), "config")
    text = ""
    with suppress(OSError):
        text = settings.read_text(encoding="utf-8", errors="replace")
    limit_s = _seconds(_value(text, rf"^h_rt=({_TIME})$"))
    if limit_s is None:
        limit_s = _seconds(_value(answer("qstat", "-j", job.number), rf"\bh_rt=({_TIME})"))
    started = _written(str(settings)) or _written(environ.get("PE_HOSTFILE", ""))
    return started + limit_s if limit_s and started else None


def _flux(job: OtherJob, _: Mapping[str, str]) -> float | None:
    left_s = _seconds(answer("flux", "job", "timeleft", job.number).strip())
    return time.time() + left_s if left_s is not None else None


_ENDS = {"pbs": _pbs, "lsf": _lsf, "sge": _sge, "flux": _flux}


def _value(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _seconds(text: str) -> float | None:
    """Seconds from a number of them, or from [DAYS-]HH:MM:SS."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    with suppress(ConfigError):
        return parse_duration(text, where="time limit")
    return None


def _written(path: str) -> float | None:
    with suppress(OSError):
        return os.stat(path).st_mtime if path else None
    return None
