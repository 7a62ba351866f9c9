"""The five ways in from Python: a script and its workers are killed at many moments of a run."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk, wait_until

BAD, BLOCKED = 7, 6
WORK = f"""
import os, time

CALLS = {{calls}}

def note(kind, number):
    fd = os.open("{{trace}}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{{{{kind}}}} {{{{number}}}}\\n".encode())
    os.close(fd)

class OddError(Exception):
    def __init__(self, number, why):
        super().__init__(number, why)

def call(number, array=None):
    "Call 0 lasts until the test lets it end, so that it runs at many kills."
    note("start", number)
    assert array is None or (array == number).all()
    while number == 0 and not os.path.exists("{{trace}}-go"):
        time.sleep(0.01)
    time.sleep(0.1)
    note("end", number)
    if number == {BAD}:
        raise OddError(number, "odd")
    return number * number / 2
"""
EXECUTOR = """
import numpy
from hpc_toolkit import Executor
from work import CALLS, OddError, call

if __name__ == "__main__":
    with Executor("runs/x", workers=2, max_attempts=1) as executor:
        arrays = [numpy.full(5000, number) for number in range(CALLS)]
        for future in [executor.submit(call, *one) for one in enumerate(arrays)]:
            try:
                print(future.result())
            except OddError as error:
                print(repr(error))
"""
CELLS = """
from hpc_toolkit import Executor
from work import CALLS, OddError, call

scale = 3
executor = Executor("runs/x", workers=2, max_attempts=1)
futures = [executor.submit(lambda number: scale * call(number), at) for at in range(CALLS)]
found = [future.exception() or future.result() for future in futures]
executor.shutdown()
"""
NOTEBOOK = f"""
import os, nbformat
from pathlib import Path
from tests.notebooks import execute

cells = [nbformat.v4.new_code_cell(text, id=name) for name, text in
         (("calls", {CELLS!r}), ("found", "print(found)"))]
nbformat.write(nbformat.v4.new_notebook(cells=cells), "cells.ipynb")
print(execute(Path("cells.ipynb"), Path.cwd(), dict(os.environ)).text("found"))
"""
JOBLIB = f"""
import joblib
import hpc_toolkit.joblib
from work import CALLS, OddError, call

if __name__ == "__main__":
    with joblib.parallel_config(backend="hpctk", n_jobs=2, run="runs/x"):
        print(joblib.Parallel()(joblib.delayed(call)(n) for n in range(CALLS) if n != {BAD}))
        try:
            joblib.Parallel()(joblib.delayed(call)(n) for n in [{BAD}])
        except OddError as error:
            print(repr(error))
"""
HYDRA = """
import hydra
from work import call

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    return call(cfg.number)

if __name__ == "__main__":
    main()
"""
STUDY = """
from work import call

def objective(trial):
    return call(trial.number) + trial.suggest_float("x", -1, 1)
"""


@dataclass(frozen=True)
class Door:
    """One of the ways: a script, how it is called, and what is left of it."""

    script: str
    number: Callable[[dict[str, Any]], int] = lambda item: item["args"][0]
    """The call's number in an item of the run."""
    words: str = "script.py"
    root: str = "runs/x"
    code: int = 0
    package: str = "hpc_toolkit"
    calls: int = 32

    def start(self, hpctk: Hpctk, where: Path) -> subprocess.Popen[str]:
        where.mkdir(exist_ok=True)
        (where / "script.py").write_text(self.script)
        (where / "work.py").write_text(WORK.format(trace=where / "trace", calls=self.calls))
        return subprocess.Popen(
            [sys.executable, *self.words.format(calls=self.calls).split()],
            cwd=where,
            # For files of kernels, which are killed as well.
            env=hpctk.environment(dict.fromkeys(("TMPDIR", "JUPYTER_RUNTIME_DIR"), str(hpctk.cwd))),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, hpctk: Hpctk, where: Path) -> tuple[list[str], dict[int, Any]]:
        """What the script printed of results and of the exception, and the rows of its run."""
        process = self.start(hpctk, where)
        out, _ = process.communicate()
        assert process.returncode == self.code, out
        if self.code:  # it ends by the exception
            return re.findall(rf"work.OddError: \({BAD}, 'odd'\)", out)[:1], self.rows(where)
        kept = [line for line in out.splitlines() if not re.match("note: |runs/x: ", line)]
        return kept, self.rows(where)

    def rows(self, where: Path) -> dict[int, Any]:
        """Outcomes of the calls that are recorded so far."""
        roots = [path.parent for path in where.glob(f"{self.root}/run.json")]
        rows = [row for root in roots for row in Run.open(root).table(partial=True)]
        names = "state", "value", "error", "attempts"
        return {self.number(row["item"]): [row.get(name) for name in names] for row in rows}


SWEEP = "script.py -m hydra/launcher=hpctk +number=range({calls}) hydra.launcher.workers=2"
TRIALS = "-m hpc_toolkit study script.py:objective --trials {calls} --workers 2 --run runs/x"
DOORS = {
    "executor": Door(EXECUTOR),
    "notebook": Door(NOTEBOOK, package="nbclient"),
    "joblib": Door(JOBLIB, package="joblib"),
    "hydra": Door(
        HYDRA, lambda item: item["kwargs"]["job"], SWEEP, "multirun/*/*/.hpctk", 1, "hydra"
    ),
    "study": Door(
        STUDY,
        lambda item: item["trial"],
        f"{TRIALS} --max-attempts 1 --seed 1 --sampler random",
        package="optuna",
    ),
}


def counts(where: Path, kind: str) -> Counter[int]:
    """How often each call has begun, or ended."""
    path = where / "trace"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return Counter(int(line.split()[1]) for line in lines if line.startswith(kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "kills"), [(12, 3), pytest.param(32, 20, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("name", DOORS)
def test_a_script_and_its_workers_are_killed_at_many_moments(
    hpctk: Hpctk, name: str, calls: int, kills: int
) -> None:
    """Results and exceptions are those of a run that nothing disturbs; no recorded call repeats."""
    door, chance = replace(DOORS[name], calls=calls), random.Random(f"{name} {kills}")
    pytest.importorskip(door.package)
    calm, where, allowed = hpctk.cwd / "calm", hpctk.cwd / "killed", dict[int, int]()
    calm.mkdir()
    (calm / "trace-go").touch()
    expected = door.run(hpctk, calm)
    assert (len(expected[1]), bool(expected[0])) == (calls, True)

    for kill in range(kills):
        before, process = counts(where, "start"), door.start(hpctk, where)

        def is_reached(before: Counter[int] = before, kill: int = kill) -> bool:
            now, ended = counts(where, "start"), counts(where, "end")
            progress = len(now) + len(ended)
            return now.total() > before.total() and progress >= 2 * calls * kill // kills

        if kill % 7:
            wait_until(lambda: is_reached() or process.poll() is not None, "the moment")  # noqa: B023
            time.sleep(chance.uniform(0, 0.1))
        else:  # perhaps before the run is there, or in the middle of writing it
            time.sleep(chance.uniform(0, 0.5))
        assert process.poll() is None, process.communicate()
        process.kill()
        hpctk.kill_all()
        process.communicate()
        begun = counts(where, "start")
        assert {one: begun[one] for one in allowed} == allowed
        allowed = {one: begun[one] for one in door.rows(where)}
        if kill == min(BLOCKED, kills) - 1:
            (where / "trace-go").touch()

    assert door.run(hpctk, where) == expected
    begun, ended = counts(where, "start"), counts(where, "end")
    assert {one: begun[one] for one in allowed} == allowed
    assert begun.keys() == ended.keys() == set(range(calls))
    assert begun.total() - ended.total() <= 2 * kills  # of two workers
    if kills > 3:
        assert door.run(hpctk, where) == expected
        assert counts(where, "start") == begun
    again = (begun.total() - calls, ended.total() - calls)
    print(f"\n{name}: {kills} kills; {again[0]} calls began again, of which {again[1]} had ended")
