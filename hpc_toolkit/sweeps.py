"""Sweeps of Hydra as runs: each job is a call of an executor, so a sweep outlives its script.

An item has the overrides of a job, its number, and fingerprints of its configuration and of the
code of the task function; by these a job is found when the sweep is started again. The task
function and the configuration that Hydra composed are in a value file of the run.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, flag_override

from hpc_toolkit.cli import load_commands
from hpc_toolkit.errors import ConfigError, RunError, describe
from hpc_toolkit.futures import Executor
from hpc_toolkit.queue.items import Item
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.files import share, writing
from hpc_toolkit.rundir.journal import ValueFile
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.rundir.pickles import dumps, refusal
from hpc_toolkit.rundir.valuefiles import read_part, stored
from hpc_toolkit.slurm.render.file import option_words
from hpc_toolkit.submit.send import cancelable_jobs
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.terminal import note
from hpc_toolkit.worker.fingerprints import of_function

log = logging.getLogger(__name__)

_ASK_S = 60.0
"""Seconds without a result after which Slurm is asked whether the jobs are there."""
_LATER = "the same line without hydra.launcher.wait=false waits for the results"
_PLACES = "hydra.sweep.dir", "hydra.sweep.subdir"


def run(*overrides: str, job: int, sweep: str, same: list[str], file: str, parts: Any) -> Any:
    """Run one job in a worker, and return what the task function returns.

    ``parts`` of ``file`` are the task function with Hydra's state, and the configuration.
    """
    task, context, singletons = _state(file, *parts[0])
    config = read_part(Path(file), parts[1])
    setup_globals()
    Singleton.set_state(singletons)
    os.chdir(config.hydra.runtime.cwd)
    found = run_job(task, config, *_PLACES, context)
    if found.status == JobStatus.FAILED:
        raise found._return_value
    return found._return_value


@lru_cache(8)
def _state(file: str, *tag: Any) -> Any:
    """The task function with Hydra's state, once for all jobs of a process."""
    found = read_part(Path(file), tag)
    if getattr(found[0], "__module__", "") == "__main__":
        # There, pickle and processes that the task starts look for its classes.
        own = getattr(found[0], "__globals__", {}).items()
        main = vars(sys.modules["__main__"])
        main.update({name: one for name, one in own if not name.startswith("__")})
    return found


class SweepJob(JobReturn):
    """The outcome of a job, which may have failed in a sweep that goes on, or not be done."""

    @property  # type: ignore[misc] # nobody sets it
    def return_value(self) -> Any:
        """None of a job that failed and is tolerated.

        Raises SystemExit, with success, for a job that is submitted: the script has done its part.
        """
        if self.status == JobStatus.UNKNOWN:
            ending = SystemExit(f"the job {self.overrides} is not done; {_LATER}")
            ending.code = 0
            raise ending
        return None


class Sweep:
    """The jobs of one sweep, in one or several batches."""

    def __init__(
        self, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Open the run, and give ``config`` the directory of a sweep that continues.

        Raises HpcToolkitError: a setting is not valid, or the run is not of such a sweep.
        """
        self._context, self._task, self._config = hydra_context, task_function, config
        self._given = given = config.hydra.launcher
        if not given.wait and not given.slurm and given.workers:
            message = "wait=false: local workers end with this script"
            raise ConfigError(message, hint="set hydra.launcher.slurm, or hydra.launcher.workers=0")
        self._code, self._noted = "".join(of_function(task_function)), False
        job, line = config.hydra.job, [*config.hydra.overrides.task]
        self._line = _digest([job.name, job.config_name, line])
        text = json.dumps(OmegaConf.to_container(config), default=str)
        timeless = OmegaConf.create(json.loads(re.sub(r"\$\{now:[^}]*\}", "*", text))).hydra
        self._root = self._place(str(timeless.launcher.run))
        self._executor = Executor(
            self._root,
            0 if given.slurm else given.workers,
            on_change=given.on_change,
            max_attempts=given.max_attempts,
            items_per_claim=1,
        )
        # A sweeper drops its launcher at the end of the sweep: then workers in Slurm jobs exit.
        weakref.finalize(self, self._executor.shutdown, wait=given.wait)
        name = f"{self._line}-{self._code}-{os.urandom(4).hex()}.values"
        self._file = self._root.absolute() / "calls" / name
        self._state: list[Any] = []
        self._mine: set[int] = set()
        """Numbers of the jobs of earlier batches."""
        known = Run.open(self._root).items()
        self._dir = known[0]["kwargs"]["sweep"] if known and "*" in timeless.sweep.dir else ""
        """Directory of the sweep that continues, if the configured one has a time."""
        if self._dir:
            _set(config, "sweep.dir", self._dir)

    def _place(self, pattern: str) -> Path:
        """The run directory; if its path has a time, that of the newest sweep by the same line.

        ``pattern``: the path with "*" for each time.
        """
        pattern = "*".join(map(glob.escape, pattern.split("*")))
        found = glob.glob(f"{pattern}/calls/{self._line}-*.values") if "*" in pattern else []
        same = [one for one in found if f"-{self._code}-" in one]
        if found and not same and self._given.on_change == "rerun":
            self._notice("their results so far stay where they are")
        elif found:
            return Path(max(same or found, key=os.path.getmtime)).parents[1]
        return Path(self._given.run)

    def launch(self, batch: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Run a batch of jobs; ``first`` is the number of its first job, unless that is used.

        Raises HpcToolkitError: the run cannot be used or written.
        """
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        load = self._context.config_loader.load_sweep_config
        configs = [load(self._config, list(overrides)) for overrides in batch]
        try:
            items = self._items(batch, configs, first)
            calls = [self._executor.submit(run, *one["args"], **one["kwargs"]) for one in items]
            self._follow(calls, items)
        except BaseException:
            self._executor.shutdown(cancel_futures=True)
            raise
        return list(map(self._outcome, configs, calls))

    def _items(
        self, batch: Sequence[Sequence[str]], configs: Sequence[DictConfig], first: int
    ) -> list[Item]:
        """The items of jobs: those in the run, and new ones with numbers that are free."""
        made, known = [], Run.open(self._root).items()
        free: dict[Any, list[Item]] = {}
        used = {item["kwargs"]["job"] for item in known}
        for item in known:
            if item["kwargs"]["job"] not in self._mine:
                free.setdefault((*item["args"], item["kwargs"]["same"][0]), []).append(item)
        rows = Run.open(self._root).table(partial=True)
        states = {_key(row["item"]): row["state"] for row in rows}
        for number, (overrides, config) in enumerate(zip(batch, configs, strict=True), first):
            own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            same = [_digest(OmegaConf.to_yaml(own)), self._code]
            alike = free.pop((*overrides, same[0]), [])
            kept, job = self._choose(alike, states)
            if job is None:
                job = max(used) + 1 if number in used else number
            used.add(job)
            free[(*overrides, same[0])] = [one for one in alike if one["kwargs"]["job"] != job]
            _set(config, "job.num", job)
            _set(config, "job.id", str(job))
            if self._dir:
                _set(config, "sweep.dir", self._dir)
            made.append(kept or self._new(overrides, config, same))
        if self._state:
            ValueFile(self._file).sync()
        self._mine |= {item["kwargs"]["job"] for item in made}
        return made

    def _choose(
        self, alike: Sequence[Item], states: dict[Any, str]
    ) -> tuple[Item | None, int | None]:
        """Which of the items with equal overrides is this job, and else whose number it gets."""
        keeps = self._given.on_change == "keep"
        for item in alike:
            kept = keeps and states.get(_key(item)) == "done"
            if kept or item["kwargs"]["same"][1] == self._code:
                return item, item["kwargs"]["job"]
        if alike and not keeps:
            self._notice(f"in {self._root}")
        # A job that may still run keeps its number, and so its directory.
        return None, next((_key(item)[0] for item in alike if _key(item) in states), None)

    def _notice(self, where: str) -> None:
        """Say once that jobs run again because the code changed; ConfigError: it must not."""
        name = getattr(self._task, "__name__", "the task function")
        if self._given.on_change == "error":
            hint = "set hydra.launcher.on_change to rerun or keep, or another hydra.sweep.dir"
            raise ConfigError(f"the code of {name} changed since jobs {where}", hint=hint)
        if not self._noted:
            note(f"{name} changed: jobs run again, {where}")
        self._noted = True

    def _new(self, overrides: Sequence[str], config: DictConfig, same: list[str]) -> Item:
        """The item of a new job, whose parts are stored."""
        with writing(self._root):
            if not self._state:
                self._file.parent.mkdir(exist_ok=True)
                share(self._file.parent)
                self._state = self._stored((self._task, self._context, Singleton.get_state()))
            parts = [self._state, self._stored(config)]
        own = {"job": config.hydra.job.num, "sweep": str(self._config.hydra.sweep.dir)}
        own |= {"same": same, "file": str(self._file), "parts": parts}
        return {"args": list(overrides), "kwargs": own}

    def _stored(self, value: Any) -> list[Any]:
        try:
            data = dumps(value)
        except Exception:  # noqa: BLE001 - of methods of the user
            raise refusal(value, "the task function with Hydra's state") from None
        return ["pickle", *stored(self._file, data)]

    def _follow(self, calls: Sequence[Future[Any]], items: Sequence[Item]) -> None:
        """Log the jobs, submit workers for those that are not done, and wait."""
        left, misses = {call for call in calls if not call.done()}, 0
        done = len(calls) - len(left)
        log.info("%d of %s are done in %s", done, counted(len(calls), "job"), self._root)
        numbers = dict(zip(calls, (item["kwargs"]["job"] for item in items), strict=True))
        for call, item in zip(calls, items, strict=True):
            ending = _ending(call) if call.done() else ""
            log.info("\t#%d : %s%s", numbers[call], " ".join(item["args"]), ending)
        if left and self._given.slurm:
            _submit(self._root, OmegaConf.to_container(self._given.slurm))
        if left and not self._given.wait:
            log.info(_LATER)
        while left and self._given.wait:
            ended, left = wait(left, _ASK_S, FIRST_COMPLETED)
            for call in ended:
                log.info("\t#%d%s", numbers[call], _ending(call))
            asks = not ended and self._given.slurm
            misses = misses + 1 if asks and not cancelable_jobs(RunPaths(self._root)) else 0
            if misses > 1:
                hint = f"'hpctk status {self._root}' shows why; the same line continues"
                message = f"the Slurm jobs have ended, and {counted(len(left), 'job')} of "
                raise RunError(f"{message}{self._root} are left", hint=hint)

    def _outcome(self, config: DictConfig, call: Future[Any]) -> JobReturn:
        """What Hydra would have returned for the job; nothing is written or logged."""
        if not call.done():
            return SweepJob(overrides=[*config.hydra.overrides.task])
        context = HydraContext(self._context.config_loader, Callbacks())
        subdir = config.hydra.output_subdir
        _set(config, "output_subdir", None)
        found = run_job(lambda _: call.result(), config, *_PLACES, context, False)
        assert found.hydra_cfg is not None
        _set(found.hydra_cfg, "output_subdir", subdir)
        if found.status == JobStatus.FAILED and not self._given.fail_sweep:
            return SweepJob(**vars(found))
        return found


def _submit(root: Path, options: Any) -> None:
    """Submit workers as ``hpctk submit`` does, unless the queue has a job of the run."""
    if queued := cancelable_jobs(RunPaths(root)):
        log.info("job %s is in the queue", queued[0].record.id)
        return
    words = ["submit", "--run", str(root)]
    for name, value in options.items():
        if name == "time" and type(value) is int:
            message = f"hydra.launcher.slurm.time: {value!r} is not text"
            raise ConfigError(message, hint="write 4h: YAML reads 4:00:00 as a number")
        if isinstance(value, dict | list):
            value = tuple(value.items() if isinstance(value, dict) else value)  # noqa: PLW2901
        words += option_words(f"--{name.replace('_', '-')}", value)
    load_commands("submit")(words, standalone_mode=False)


def _key(item: Item) -> tuple[int, str]:
    return item["kwargs"]["job"], item["kwargs"]["same"][1]


def _ending(call: Future[Any]) -> str:
    error = call.exception()
    return " : done" if error is None else f" : failed: {describe(error)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _set(config: DictConfig, name: str, value: Any) -> None:
    with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
        OmegaConf.update(config.hydra, name, value, force_add=True)
