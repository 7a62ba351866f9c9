"""The Slurm job that this process is the batch script of: its facts, its environment, its log."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm import client
from hpc_toolkit.slurm.client import PATIENCE_S, SlurmError, answer
from hpc_toolkit.slurm.controller import host_names
from hpc_toolkit.slurm.records import script_options
from hpc_toolkit.system.processes import WARNING_NAMES
from hpc_toolkit.system.ranks import host_name, without_rank

SRUN_READS = {
    "mem": "SLURM_MEM_PER_NODE",
    "mem-per-cpu": "SLURM_MEM_PER_CPU",
    "mem-per-gpu": "SLURM_MEM_PER_GPU",
    "gpus": "SLURM_GPUS",
    "gpus-per-node": "SLURM_GPUS_PER_NODE",
    "gpus-per-task": "SLURM_GPUS_PER_TASK",
    "gpu-bind": "SLURM_GPU_BIND",
    "gres": "SLURM_GRES",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
    "cpus-per-gpu": "SLURM_CPUS_PER_GPU",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "ntasks-per-gpu": "SLURM_NTASKS_PER_GPU",
    "ntasks-per-socket": "SLURM_NTASKS_PER_SOCKET",
    "distribution": "SLURM_DISTRIBUTION",
    "hint": "SLURM_HINT",
    "threads-per-core": "SLURM_THREADS_PER_CORE",
}
"""What srun reads from the environment (srun(1), INPUT ENVIRONMENT VARIABLES), by the option of
sbatch that sets it for a job's own steps."""

_OF_STEPS = ("SLURM_STEP", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_TRES")
_WARNED = "HPCTK_WARNED"
_DIRECTORY = "HPCTK_DIRECTORY"
"""Where the script was before its setup."""


class JobError(HpcToolkitError):
    """This job cannot run: the log says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A running job, as its batch process sees it."""

    id: str
    """What squeue and scancel call it: ``17``, or ``17_3`` for an element of an array."""
    name: str
    restarts: str
    """How often Slurm has restarted it, for the log."""
    nodes: tuple[str, ...]
    options: Mapping[str, str]
    deadline: int | None
    """Epoch seconds at which Slurm ends it; None if Slurm did not say."""
    warned: bool
    """Whether the warning of the time limit came before this process could receive it."""

    def log(self, text: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        show(f"{now} {self.name}[{self.id}.{self.restarts}] {text}\n")

    def facts(self) -> str:
        version = client.text(["srun", "--version"]).strip() or "unknown"
        end = self.deadline or "unknown"
        return f"nodes={','.join(self.nodes)} deadline={end} slurm={version}"


def this_job(script: Path, *, array_offset: int = 0) -> Job:
    """The job around this process, with ``os.environ`` and the directory ready for its steps.

    The ``#SBATCH`` lines of ``script``, the running one, say which variables are this job's.
    ``array_offset`` is added to the array's index in HPCTK_ARRAY_INDEX.

    Raises JobError: this is not a job, or its nodes or its directory are not there.
    """
    environ = os.environ
    raw = environ.get("SLURM_JOB_ID")
    if not raw:
        msg = "this is not a Slurm job"
        raise JobError(msg, hint=f"start it with sbatch: sbatch {shlex.quote(script.name)}")
    # A script that cannot be read has no options.
    text = ""
    with suppress(OSError):
        text = script.read_text(encoding="utf-8", errors="replace")
    options = script_options(text)
    row = _row(raw)
    number = _element(row, options, environ, array_offset)
    clean_environment(environ, options)
    before = environ.pop(_DIRECTORY, None)
    directory = row.get("directory", before)
    if directory is not None:
        _enter(directory)
    deadline = environ.get("SLURM_JOB_END_TIME") or row.get("end", "")
    ends = int(deadline) if re.fullmatch("[0-9]+", deadline) else None
    environ.pop("HPCTK_DEADLINE", None)
    if ends is not None:
        environ["HPCTK_DEADLINE"] = str(ends)
    return Job(
        id=number,
        name=environ.get("SLURM_JOB_NAME", "job"),
        restarts=environ.get("SLURM_RESTART_COUNT", "0"),
        nodes=_nodes(environ),
        options=options,
        deadline=ends,
        warned=_was_warned(environ, options, row.get("start", ""), ends),
    )


def clean_environment(environ: MutableMapping[str, str], options: Mapping[str, str]) -> None:
    """Prepare the environment for the job's steps.

    A job that was submitted from inside another one inherits variables that srun would read as its
    own; those that the script's options do not set are removed. So are those of a rank that called
    sbatch: a script may set MASTER_PORT, but it is never a rank.
    """
    foreign = {name for option, name in SRUN_READS.items() if option not in options}
    if "RANK" in environ:
        foreign |= environ.keys() - without_rank(environ).keys()
    foreign |= {"SRUN_CPUS_PER_TASK", "SLURM_LABELIO"}
    for name in list(environ):
        if name in foreign or name.startswith(_OF_STEPS):
            del environ[name]
    # After 'sbatch --export=NONE' srun would start its tasks with an empty environment.
    environ["SLURM_EXPORT_ENV"] = "ALL"
    environ.setdefault("PYTHONUNBUFFERED", "1")


def _row(raw: str) -> dict[str, str]:
    """The controller's entry for this job; empty while it does not answer."""
    names = ("id", "index", "start", "end", "directory")
    argv = ["squeue", "--noheader", f"--jobs={raw}", "--format=%A|%K|%S|%e|%Z"]
    try:
        done = answer(argv, timeout_s=PATIENCE_S)
    except SlurmError:
        return {}
    # A directory's name may be in any encoding.
    listed = os.fsdecode(done.raw) if done.code == 0 else ""
    # The raw id of an array's last element is also the array's, and lists every element.
    # A directory's name may have several lines.
    field = r"([^|]*)\|"
    rows = re.findall(rf"(?ms)^([0-9]+)\|{field * 3}(.*?)\n(?=[0-9]+\||\Z)", listed)
    return next((dict(zip(names, row, strict=True)) for row in rows if row[0] == raw), {})


def _element(
    row: dict[str, str], options: Mapping[str, str], environ: MutableMapping[str, str], offset: int
) -> str:
    """The job's id, with its variables for an element of an array."""
    environ.pop("HPCTK_ARRAY_INDEX", None)
    element = row["index"] != "N/A" if row else "array" in options
    if not element:
        # A job that an array's element submits inherits the element's variables.
        for name in [name for name in environ if name.startswith("SLURM_ARRAY")]:
            del environ[name]
        return environ["SLURM_JOB_ID"]
    index = int(environ["SLURM_ARRAY_TASK_ID"])
    environ["HPCTK_ARRAY_INDEX"] = str(index + offset)
    # The last element has the array's own number, which would stand for all elements.
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{index}"


def _enter(directory: str) -> None:
    """Go to the job's directory, which the site's setup may have left."""
    # Where a node lacks the job's directory, Slurm starts the script in /tmp instead.
    if not Path(directory).is_dir():
        msg = f"{host_name()} cannot see the job's directory {directory}"
        raise JobError(msg, hint="submit from a directory on a shared filesystem")
    if not Path().samefile(directory):
        show(f"the setup moved to {Path.cwd()}, back to {directory}: --sbatch chdir moves a job\n")
        os.chdir(directory)


def _nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    names = host_names(environ.get("SLURM_JOB_NODELIST", ""), timeout_s=PATIENCE_S)
    expected = environ.get("SLURM_JOB_NUM_NODES")
    if str(len(names)) != expected:
        raise JobError(f"the job has {expected} nodes, but scontrol names {len(names)}")
    return tuple(names)


def _was_warned(
    environ: MutableMapping[str, str], options: Mapping[str, str], start: str, ends: int | None
) -> bool:
    """Whether Slurm's warning came while the script was in its setup or Python was starting."""
    if environ.pop(_WARNED, None) is not None:
        return True
    lead = re.search(rf"(?:{WARNING_NAMES.replace(' ', '|')})@([0-9]+)", options.get("signal", ""))
    if ends is None or lead is None or not start.isdecimal():
        return False
    # In a job whose limit is shorter than the lead, no time of this start is before the warning.
    return int(start) < ends - int(lead[1]) <= time.time()


def show(text: str) -> None:
    """Write complete lines to the job's log."""
    # A full disk must not keep a job from being requeued.
    with suppress(OSError):
        os.write(1, text.encode(errors="replace"))
