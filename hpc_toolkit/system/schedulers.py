"""Jobs of schedulers other than Slurm: PBS, LSF, Grid Engine and Flux, by their variables.

Slurm's own variables are read in :mod:`hpc_toolkit.system.ranks`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Ranks(NamedTuple):
    """The variables of one launcher: rank and size in the job and on the node."""

    rank: str
    local_rank: str
    size: str
    local_size: str


def _named(prefix: str) -> Ranks:
    return Ranks(*(f"{prefix}_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")))


_MPI = (
    _named("OMPI_COMM_WORLD"),
    Ranks("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
    _named("JSM_NAMESPACE"),
)
"""Open MPI; MPICH, Intel MPI and PALS; jsrun of LSF."""
_FLUX = Ranks("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE", "")


class Scheduler(NamedTuple):
    """The variables of one scheduler; "" where it has none."""

    name: str
    sign: str
    """Set in its jobs and in no others."""
    job: str
    element: str
    """The element of an array; 0, "undefined" or unset for other jobs."""
    title: str
    ranks: tuple[Ranks, ...]
    hosts: str
    """A file with a host at the start of each line, or words of hosts and their slots."""
    starter: str
    """What starts one process per slot on all hosts."""


SCHEDULERS = (
    Scheduler("pbs", "PBS_JOBID", "PBS_JOBID", "", "PBS_JOBNAME", _MPI, "PBS_NODEFILE", "mpiexec"),
    Scheduler(
        *("lsf", "LSB_JOBID", "LSB_JOBID", "LSB_JOBINDEX", "LSB_JOBNAME"),
        *(_MPI, "LSB_MCPU_HOSTS", "mpiexec"),
    ),
    Scheduler(
        "sge", "SGE_TASK_ID", "JOB_ID", "SGE_TASK_ID", "JOB_NAME", _MPI, "PE_HOSTFILE", "mpiexec"
    ),
    Scheduler("flux", "FLUX_JOB_ID", "FLUX_JOB_ID", "", "", (_FLUX, *_MPI), "", "flux run"),
)


class OtherJob(NamedTuple):
    """A job of one of these schedulers, as one of its processes sees it."""

    scheduler: Scheduler
    number: str
    """The job's id for the scheduler's commands."""
    element: str
    """The index of an element of an array; "" for another job."""
    title: str
    rank: Ranks | None
    """The variables of this rank; None outside a parallel start, as in the job's script."""

    @property
    def id(self) -> str:
        """The id in files of a run, such as ``lsf:17[3]``; Slurm is never asked about it."""
        number = self.number.partition(".")[0] + (f"[{self.element}]" if self.element else "")
        return f"{self.scheduler.name}:{number}"[:64]


def other_job(environ: Mapping[str, str]) -> OtherJob | None:
    """Return the job of this process; None outside a job, and in Slurm's.

    A job of Flux within a job of another scheduler is Flux's.
    """
    if "SLURM_JOB_ID" in environ:
        return None
    for one in reversed(SCHEDULERS):
        number = environ.get(one.job, "")
        if number and environ.get(one.sign):
            index = environ.get(one.element, "")
            triples = (names for names in one.ranks if environ.get(names.rank, "").isdigit())
            return OtherJob(
                scheduler=one,
                number=number,
                element=index if index.isdigit() and int(index) else "",
                title=environ.get(one.title, ""),
                rank=next(triples, None),
            )
    return None


def job_hosts(environ: Mapping[str, str]) -> list[str]:
    """The hosts of this process's job, in the scheduler's order; empty if they are not listed.

    PBS and Grid Engine list them in a file, which may exist on the first host only.
    """
    job = other_job(environ)
    value = environ.get(job.scheduler.hosts, "") if job is not None else ""
    if not value.startswith("/"):
        return list(dict.fromkeys(value.split()[::2]))
    lines: list[str] = []
    with suppress(OSError, UnicodeDecodeError):
        lines = Path(value).read_text(encoding="utf-8").splitlines()
    return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
