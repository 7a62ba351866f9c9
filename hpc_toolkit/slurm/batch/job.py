"""The Slurm job of this process: its facts, environment and log, the signals and the step."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm import client
from hpc_toolkit.slurm.client import ASK_S, PATIENCE_S, SlurmError, answer, ask
from hpc_toolkit.slurm.controller import host_names, parse_config
from hpc_toolkit.slurm.records import script_options
from hpc_toolkit.system.processes import (
    CUT_SHORT,
    WARNING_NAME,
    WARNING_NAMES,
    WARNINGS,
    readable,
    shell_code,
)
from hpc_toolkit.system.ranks import host_name, without_rank

_OPTIONS = (
    *("mem-per-cpu", "mem-per-gpu", "gpus", "gpus-per-node", "gpus-per-task", "gpu-bind", "gres"),
    *("cpus-per-task", "cpus-per-gpu", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket"),
    *("distribution", "hint", "threads-per-core"),
)
SRUN_READS = {
    "mem": "SLURM_MEM_PER_NODE",
    **{option: f"SLURM_{option.upper().replace('-', '_')}" for option in _OPTIONS},
}
"""What srun reads from the environment (srun(1), INPUT ENVIRONMENT VARIABLES), by the option of
sbatch that sets it for a job's own steps."""

_OF_STEPS = ("SLURM_STEP", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_TRES")
_WARNED = "HPCTK_WARNED"
_DIRECTORY = "HPCTK_DIRECTORY"
"""Where the script was before its setup."""
NO_MPI = "--mpi=none"
"""For steps of hpctk's own programs: srun fails if the library of the site's MpiDefault is missing,
and an item that uses MPI alone would join the step's ranks."""
_KILL_WAIT_S = 30.0


class JobError(HpcToolkitError):
    """This job cannot run: the log says why."""


class JobEnd(Exception):  # noqa: N818 - not an error: most jobs end by it
    """The batch process ends here, with an exit code that tells Slurm how the job ended."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


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


class Signals:
    """The warning, SIGTERM and SIGCHLD of this process, in the order in which they came.

    The handlers do nothing: Python writes each signal's number into a pipe. A child starts with the
    default actions, since exec resets handlers.
    """

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        self._seen: deque[int] = deque()
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (*WARNINGS, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def next(self, timeout_s: float | None) -> int | None:
        """The oldest signal that was not returned yet; None after ``timeout_s`` without one."""
        if not self._seen and readable(self._read, timeout_s=timeout_s):
            self._seen.extend(os.read(self._read, 4096))
        return self._seen.popleft() if self._seen else None


class Batch:
    """The batch process of a job: what Slurm has asked of the job, and how the job is cleaned up.

    Ranks are sent the signal ``warning`` when the time limit is near.
    The commands of ``teardown``, each as its words, run once at the end, however the job ends.
    """

    def __init__(
        self,
        job: Job,
        signals: Signals,
        *,
        warning: str = WARNING_NAME,
        teardown: Sequence[Sequence[str]] = (),
    ) -> None:
        self.job = job
        self.warned = job.warned
        """Whether the time limit is near. Ranks that start later know when the job ends."""
        self.ended = False
        """Whether Slurm ends the job: cancelled, preempted, or at its time limit."""
        self.cleanup: list[list[str]] = [as_command(one) for one in teardown]
        """Commands that still have to run at the end."""
        self._signals = signals
        self._warning = warning
        self._leave_at: float | None = None
        self._step: subprocess.Popen[bytes] | None = None

    def once_per_node(
        self, *options: str, within_s: int = 60, nodes: Sequence[str] = ()
    ) -> list[str]:
        """The words before those of a command that runs once on each of ``nodes``, or on all."""
        number = len(nodes or self.job.nodes)
        # Without --immediate srun waits for a node that is down until the job's time is over.
        argv = ["srun", NO_MPI, f"--immediate={within_s}", "--overlap", f"--nodes={number}"]
        argv += [f"--ntasks={number}", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
        # A task alone on its node sees all of the job's GPUs there.
        bound = ["--gpu-bind=none"] if "gpu-bind" in self.job.options else []
        bound += [f"--nodelist={','.join(nodes)}"] if nodes else []
        return [*argv, *bound, *options]

    def start(self, argv: Sequence[str]) -> None:
        self._step = subprocess.Popen(list(argv))

    def call(self, argv: Sequence[str]) -> int:
        """Run a command to its end; its exit code, 128 + N for signal N.

        Signals that come meanwhile are acted on afterwards.
        """
        code = subprocess.run(list(argv), check=False).returncode
        self.receive_all()
        return shell_code(code)

    @property
    def running(self) -> bool:
        return self._step is not None and self._step.poll() is None

    def wait(self, beside: Callable[[], float | None] = lambda: None) -> int:
        """Wait for the step, and act on signals meanwhile; the step's exit code.

        ``beside`` is called whenever a child has ended, and after the seconds that it returned.
        """
        code = self.wait_for(lambda: self._step.poll() if self._step else 0, beside)
        self.job.log(f"the step ended with code {code}")
        return code

    def wait_for(
        self, poll: Callable[[], int | None], beside: Callable[[], float | None] = lambda: None
    ) -> int:
        """Wait until ``poll`` returns an exit code, negative for a signal; 128 + N for signal N.

        Raises JobEnd where Slurm ends the job and srun waits for a lost node.
        """
        while (code := poll()) is None:
            self.receive_all()
            leaving = self._leave_at and max(0.0, self._leave_at - time.monotonic())
            waits = [one for one in (beside(), leaving) if one is not None]
            if poll() is not None:  # by what happened beside
                continue
            self._receive(self._signals.next(min(waits, default=None)))
            if self._leave_at is not None and time.monotonic() >= self._leave_at:
                self._leave_at = None
                if lost_nodes(self.job, timeout_s=ASK_S):
                    self.job.log("srun still waits for a lost node; exiting")
                    raise JobEnd(CUT_SHORT)
        self.receive_all()
        return shell_code(code)

    def _receive(self, number: int | None) -> None:
        if number in WARNINGS:
            self.warned, name = True, signal.Signals(number).name
            self.job.log(f"the time limit is near: asking the ranks to finish ({name})")
            self.warn_ranks()
        elif number == signal.SIGTERM:
            self.ended = True
            self.job.log("Slurm ends this job (SIGTERM)")
            if self.cleanup and self._leave_at is None:
                # Slurm kills this process KillWait after SIGTERM. The srun of Slurm 26.05 may wait
                # longer for the tasks of a lost node, so the teardown starts after three quarters
                # of KillWait; the other ranks keep the rest of it.
                self._leave_at = time.monotonic() + _kill_wait_s() * 3 / 4

    def warn_ranks(self) -> None:
        try:
            ask(["scancel", f"--signal={self._warning}", self.job.id], timeout_s=PATIENCE_S)
        except SlurmError as error:
            self.job.log(f"scancel could not reach the ranks: {error.message}")

    def receive_all(self) -> None:
        while (number := self._signals.next(0)) is not None:
            self._receive(number)

    def clean_up(self) -> None:
        """Run the teardown, once. Failures are logged and change no exit code."""
        commands, self.cleanup = self.cleanup, []
        for argv in commands:
            if self.call(argv):
                words = argv[4:] if argv[0] == "bash" else argv
                self.job.log(f"teardown failed: {shlex.join(words)}")


def as_command(words: Sequence[str]) -> list[str]:
    """The words of a command that may also be one of bash's own, as an argument list."""
    return ["bash", "-c", '"$@"', "bash", *words]


def lost_nodes(job: Job, *, timeout_s: float = PATIENCE_S) -> bool:
    argv = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(job.nodes)}"]
    return bool(client.text([*argv, "--states=down,no_respond"], timeout_s=timeout_s).strip())


def _kill_wait_s() -> float:
    config = client.text(["scontrol", "show", "config"], timeout_s=ASK_S)
    found = re.match("[0-9]+", parse_config(config).get("KillWait", ""))
    return float(found[0]) if found else _KILL_WAIT_S
