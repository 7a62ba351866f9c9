"""Scripts that use the Python API: with real workers, killed, interrupted and started again."""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit import Executor
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.run import Run
from hpc_toolkit.system.processes import parent_of
from tests.integration.realrun import Hpctk, journal_lines, wait_until, workers_of

SCRIPT = """
import os
import sys
import time
from concurrent.futures import as_completed

from hpc_toolkit import Executor
from hpc_toolkit.system.processes import parent_of


def slow(number, trace):
    with open(trace, "a", buffering=1) as file:
        file.write(f"start {number} {parent_of(os.getppid())[0]}\\n")
    time.sleep(0.2)
    return {"square": number**2}


if __name__ == "__main__":
    with Executor("runs/x", workers=int(sys.argv[1])) as executor:
        calls = [executor.submit(slow, number, trace="trace") for number in range(12)]
        print(sorted(call.result()["square"] for call in as_completed(calls)))
"""
PRINTED = f"{sorted(number**2 for number in range(12))}\n"


class Scripts:
    """Starts ``script.py`` as users do."""

    def __init__(self, hpctk: Hpctk, text: str = SCRIPT) -> None:
        self._hpctk = hpctk
        Path("script.py").write_text(text)

    def start(self, *words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "script.py", *map(str, words)],
            env=self._hpctk.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: object) -> tuple[int, str, str]:
        ended = self._hpctk.python("script.py", *words)
        return ended.code, ended.out, ended.err

    def started(self) -> list[list[str]]:
        """The words of the lines that calls wrote as they began."""
        return self._hpctk.noted("start")


@pytest.fixture
def scripts(hpctk: Hpctk) -> Scripts:
    return Scripts(hpctk)


def each_has_one_result() -> Run:
    run = Run.open("runs/x")
    done = Counter(line["unit"] + str(line["item"]) for line in journal_lines(run, "done"))
    assert set(done.values()) == {1}
    assert [row["attempts"] for row in run.results()] == [1] * 12
    return run


@pytest.mark.parametrize("killed", ["a worker", "the process of local workers"])
def test_what_is_killed_is_replaced_and_the_script_goes_on(scripts: Scripts, killed: str) -> None:
    script = scripts.start(2)
    worker = int(wait_until(scripts.started, "a call")[0][2])
    os.kill(worker if killed == "a worker" else parent_of(worker)[0], signal.SIGKILL)

    out, err = script.communicate()
    assert out == PRINTED
    run = each_has_one_result()
    if killed == "a worker":
        assert (err, len(workers_of(run))) == ("", 3)


def test_an_interrupted_script_leaves_its_calls_and_no_process(scripts: Scripts) -> None:
    first = scripts.start(1)
    wait_until(scripts.started, "a call")
    first.send_signal(signal.SIGINT)

    _, err = first.communicate()
    assert "KeyboardInterrupt" in err
    assert not Run.open("runs/x").status().stages["items"].sealed
    assert scripts.run(2) == (0, PRINTED, "")
    each_has_one_result()


STOPPED = """
import sys
import time
from pathlib import Path

import numbers_
from hpc_toolkit import Executor

if __name__ == "__main__":
    with Executor("runs/x", workers=1) as executor:
        futures = [executor.submit(numbers_.held, n) for n in range(3)]
        number = numbers_.first()
        executor.shutdown(wait=False, cancel_futures=True)
        while "draining" not in "".join(map(Path.read_text, Path("runs/x/workers").glob("*.json"))):
            time.sleep(0.01)
        Path("over").touch()
    print(futures[number].result() - number, sum(one.cancelled() for one in futures))
"""
HELD = """
import time
from pathlib import Path


def first():
    while not (started := list(Path().glob("started-*"))):
        time.sleep(0.01)
    return int(started[0].name[-1])


def held(number):
    Path(f"started-{number}").touch()
    while not Path("over").exists():
        time.sleep(0.01)
    return number + 1
"""


def test_cancelled_futures_leave_the_running_call_its_result(hpctk: Hpctk) -> None:
    Path("numbers_.py").write_text(HELD)

    assert Scripts(hpctk, STOPPED).run() == (0, "1 2\n", "")


def calls_of_run() -> tuple[StageLog, list[list[Any]]]:
    """The log of the run, and the arguments of its calls."""
    view = Run.open("runs/x").view
    view.poll()
    log = view.stages["items"].log
    lines = [line for segment in log.segments.values() for line in segment.items()]
    return log, [json.loads(line)["args"] for line in lines]


ENDS = """
import atexit
import os
import shutil
import sys

from hpc_toolkit import Executor
from numbers_ import twice


def late():
    for get in (lambda: executor, lambda: Executor("runs/late")):
        try:
            get().submit(twice, 0)
        except RuntimeError as error:
            print(error)


if __name__ == "__main__":
    executor = Executor("runs/x")
    atexit.register(late)
    for number in range(200):
        executor.submit(twice, number)
    {}
"""
TWICE = """
from hpc_toolkit import Executor


def twice(number):
    return 2 * number


def submit():
    Executor("runs/x").submit(twice, 1)
"""
REFUSED = "cannot schedule new futures after shutdown, or in a forked process\n"


@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 0), ("executor.shutdown(wait=False)", 0), ("sys.exit(3)", 3), ("1 / 0", 1)],
)
def test_calls_are_in_the_run_however_the_script_ends(hpctk: Hpctk, end: str, code: int) -> None:
    Path("numbers_.py").write_text(TWICE)

    ended = Scripts(hpctk, ENDS.format(end)).run()

    assert ended[:2] == (code, 2 * REFUSED)
    log, args = calls_of_run()
    assert args == [[number] for number in range(200)]
    assert not log.sealed


def test_the_workers_of_a_dropped_executor_exit(hpctk: Hpctk) -> None:
    Path("numbers_.py").write_text(TWICE)
    text = ENDS.replace("range(200)", "range(3)").replace('"runs/x"', '"runs/x", workers=2')
    drop = "future = executor.submit(twice, 4); thread = executor._thread; del executor"
    wait = "print(future.result()); thread.join(); atexit.unregister(late)"
    left = 'print(open(f"/proc/self/task/{os.getpid()}/children").read())'

    ended = Scripts(hpctk, text.format(f"{drop}; {wait}; {left}")).run()

    assert ended == (0, "8\n\n", "")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_calls_of_an_executor_in_a_child_process_are_in_the_run(hpctk: Hpctk, method: str) -> None:
    Path("numbers_.py").write_text(TWICE)
    text = f"""
import multiprocessing
from numbers_ import submit

if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=submit)
    child.start()
    child.join()
"""
    assert Scripts(hpctk, text).run() == (0, "", "")
    assert calls_of_run()[1] == [[1]]


@pytest.mark.parametrize("seal", [True, False])
def test_workers_elsewhere_exit_when_the_calls_of_the_script_are_done(
    hpctk: Hpctk, *, seal: bool
) -> None:
    script = Scripts(hpctk, SCRIPT.replace("workers=", f"seal={seal}, workers=")).start(0)
    wait_until(lambda: Path("runs/x").exists(), "the run")

    assert hpctk("work", "runs/x", "--workers", 2).code == 0
    assert script.communicate() == (PRINTED, "")
    each_has_one_result()


NEEDING = """
import sys
from hpc_toolkit import Executor, background
from hpc_toolkit.errors import ConfigError, ItemsError

background._NOTE_S = 0.1

def use(mib):
    return len(bytearray(mib << 20)) >> 20

if __name__ == "__main__":
    more = {"on": "oom", "memory": "x2", "up_to": "512M"}
    own = {"needs": {"memory": "64M"}, "retry": more, "max_attempts": 1}
    with Executor("runs/x", workers=int(sys.argv[1]), **own) as executor:
        licensed = executor.with_needs(licence=1, priority=5)
        small = [executor.submit(use, mib) for mib in (1, 200)]
        large = licensed.map(use, [2, 3])
        print([call.result() for call in small], list(large), flush=True)
        try:
            executor.with_needs(memory="1G")
        except ItemsError as refused:
            print(refused.message)
    try:
        Executor("runs/y").with_needs(cpus=1)
    except ConfigError as refused:
        print(refused.message)
"""


def test_a_call_waits_for_a_worker_that_has_what_it_needs(hpctk: Hpctk) -> None:
    script = Scripts(hpctk, NEEDING).start(0)
    wait_until(lambda: Path("runs/x").exists(), "the run")
    first = ("work", "runs/x", "--memory-per-worker", "128M")
    plain = hpctk.start(*first)
    # The process of a call has about 100 MiB itself, so 200 MiB fit where 256 MiB are not enough.
    assert script.stderr is not None
    # Whether it first notes that there is no worker depends on when this one starts.
    lines = (line for line in script.stderr if "waits for workers" not in line)
    submit = f"hpctk submit --run {Path.cwd()}/runs/x --mem 256M"
    most = "1 item of items needs 256.0 MiB of memory; no worker has more than 128.0 MiB of memory"
    licence = "2 items of items need 1 licence; no worker has more than 0; start a worker with it"
    assert sorted([next(lines), next(lines)]) == [
        f"note: runs/x: {most}; {submit}\n",
        f"note: runs/x: {licence}\n",
    ]
    done = hpctk("work", "runs/x", "--memory-per-worker", "512M", "--has", "licence=1")

    out, err = script.communicate()
    assert done.code == 0
    assert plain.ended().code in (0, 75)  # which of the calls it has read when it is asked to exit
    refused = "retry.up_to: 512.0 MiB of memory is not more than the 1.0 GiB of memory"
    later = "workers do not know that calls may have needs"
    assert out == f"[1, 200] [2, 3]\n{refused} of the first attempt\n{later}\n", err
    rows = Run.open("runs/x").results()
    assert [row["attempts"] for row in rows] == [1] * 4
    assert len({row["worker"] for row in rows if row["item"]["args"][0] in (2, 3)}) == 1
    life = json.loads(hpctk("explain", "runs/x", "--item", 1, "--json").out)
    sizes = [one["needs"]["memory"] >> 20 for one in life["attempts"]]
    assert sizes[:2] == [64, 128]


def test_a_script_needs_no_guard_but_a_module_that_workers_import_does(hpctk: Hpctk) -> None:
    text = SCRIPT.replace('if __name__ == "__main__":', "if True:").replace("int(sys.argv[1])", "1")
    scripts = Scripts(hpctk, text)
    assert scripts.run() == (0, PRINTED, "")

    Path("module.py").write_text(text.replace("range(12)", "range(1)").replace("/x", "/y"))
    Path("script.py").write_text("import module")
    code, _, err = scripts.run()
    assert code == 1
    assert "RunError: runs/y: a worker imports this script" in err
    assert "below if __name__ == '__main__':\n" in err


ANYTHING = """
import dataclasses, datetime, enum, functools, multiprocessing, pathlib, threading
import numpy as np
from hpc_toolkit import Executor

@dataclasses.dataclass
class Config:
    lr: float
    tags: tuple

class Refused(Exception):
    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")
        self.what = what

class Model:
    def __init__(self, factor):
        self.factor = factor
    def times(self, x):
        return self.factor * x

def noted(value, other=None):
    with open("trace", "a", buffering=1) as file:
        file.write("call\\n")
    return value, other

def helper(x):
    return x + 1

def with_a_pool(n):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(helper, range(n))

def fails(how):
    if how == "divide":
        return 1 / 0
    if how == "frozen":
        raise Frozen(3)
    if how == "lock":
        error = ValueError("not to be pickled")
        error.lock = threading.Lock()
        raise error
    raise Refused(how, "never")

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass(slots=True)
class Small:
    x: int

@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int

VALUES = [None, 0.5, float("nan"), "text", (1, (2, 3)), {"a": {1, 2}}, {(1, 2): 3}, b"bytes",
          10**30, [1, 2.0, None], np.float32(1.5), np.arange(3), np.arange(20_000.0),
          np.array([{}], dtype=object), datetime.date(2026, 1, 2), pathlib.Path("a"), Color.RED,
          Small(3), np.array(["2026-01-02"], "M8[D]"),
          Config(0.1, ("x",)), Model(2).times, Config, len]

def same(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and list(one) == list(other)
    if isinstance(one, type(Model(2).times)):
        return one(3) == other(3) and isinstance(other.__self__, Model)
    return type(one) is type(other) and repr(one) == repr(other)

k = 7
with Executor("runs/x", max_workers=2, max_attempts=1) as executor:
    echoes = [executor.submit(noted, one, other=[one]) for one in VALUES]
    wrong = [one for one, echo in zip(VALUES, echoes) if not same(one, echo.result()[0])
             or not same(one, echo.result()[1][0]) or type(echo.result()) is not tuple]
    print("wrong:", wrong)
    print(executor.submit(lambda x: x * k, 6).result(), executor.submit(Model(3).times, 5).result())
    print(executor.submit(with_a_pool, 3).result(), *executor.map(functools.partial(pow, 2), [5]))
    makers = [lambda x, n=n: x + n for n in range(3)]
    print([executor.submit(maker, 1).result() for maker in makers])
    for how in ("divide", "refuse", "frozen", "lock"):
        error = executor.submit(fails, how).exception()
        said = "failed after 1 attempt" in f"{error} {getattr(error, '__notes__', '')}"
        print(type(error).__name__, said, type(error.__cause__).__name__)
"""
PRINTED_OF_ANYTHING = """wrong: []
42 15
[1, 2, 3] 32
[1, 2, 3]
ZeroDivisionError True RemoteTraceback
Refused True RemoteTraceback
Frozen False RemoteTraceback
CallError True NoneType
"""


def test_functions_arguments_results_and_exceptions_arrive_as_they_were(hpctk: Hpctk) -> None:
    scripts = Scripts(hpctk, ANYTHING)

    assert scripts.run() == (0, PRINTED_OF_ANYTHING, "")
    before = journal_lines(Run.open("runs/x"))
    assert scripts.run() == (0, PRINTED_OF_ANYTHING, "")

    assert journal_lines(Run.open("runs/x")) == before
    assert len(hpctk.noted("call")) == 23
    assert hpctk("gather", "runs/x", "-o", "rows.csv").code == 0
    assert hpctk("report", "runs/x", "-o", "report.html").code == 0


POOLS = """
import multiprocessing
from functools import partial
from hpc_toolkit import Executor

def square(number):
    return number * number

def squares(method, count):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(square, range(count))

class Squares:
    def __call__(self, count):
        return squares("fork", count)

if __name__ == "__main__":
    with Executor("runs/x", max_workers=1, max_attempts=1) as executor:
        calls = [partial(squares, "spawn"), lambda n: squares("forkserver", n), Squares()]
        for call in [*calls, partial(squares, "fork")]:
            print(executor.submit(call, 3).result())
"""


def test_the_functions_of_a_script_start_processes_in_every_way(hpctk: Hpctk) -> None:
    assert Scripts(hpctk, POOLS).run() == (0, 4 * "[0, 1, 4]\n", "")


def test_a_script_without_a_guard_is_not_run_again_by_processes_of_its_functions(
    hpctk: Hpctk,
) -> None:
    script = """
from joblib import Parallel, delayed
from hpc_toolkit import Executor

def squares(count):
    return Parallel(2)(delayed(pow)(number, 2) for number in range(count))

with Executor("runs/x", max_workers=1, max_attempts=1) as executor:
    print(executor.submit(squares, 3).result())
"""
    assert Scripts(hpctk, script).run() == (0, "[0, 1, 4]\n", "")


CHANGES = """
from hpc_toolkit import Executor

def count(number):
    with open("trace", "a", buffering=1) as file:
        file.write("call\\n")
    return 2 * number

def apply(function, number):
    return function(number)

if __name__ == "__main__":
    with Executor("runs/x", workers=1) as executor:
        print(list(executor.map(count, range(5))))
"""
NOTE = "note: __main__:count changed: its calls run again; 5 results of the code before stay in "
CHANGED = "ConfigError: the code of __main__:count changed since runs/x has calls of it\n"
GIVEN = CHANGES.replace("executor.map(count,", "executor.map(apply, 5 * [count],")
GIVEN_NOTE = (
    "note: code in what __main__:apply holds or is given changed: calls with it run again; "
)


@pytest.mark.parametrize(
    ("script", "on_change", "printed", "said", "calls"),
    [
        (CHANGES, "rerun", "[0, 3, 6, 9, 12]\n", NOTE, 10),
        (CHANGES, "keep", "[0, 2, 4, 6, 8]\n", "", 5),
        (CHANGES, "error", "", CHANGED, 5),
        (GIVEN, "rerun", "[0, 3, 6, 9, 12]\n", GIVEN_NOTE, 10),
    ],
)
def test_code_that_changed_runs_again_unless_told_otherwise(
    hpctk: Hpctk, script: str, on_change: str, printed: str, said: str, calls: int
) -> None:
    scripts = Scripts(hpctk, script)
    assert scripts.run() == (0, "[0, 2, 4, 6, 8]\n", "")

    text = script.replace("2 * number", "3 * number")
    Path("script.py").write_text(text.replace("workers", f"on_change='{on_change}', workers"))
    _, out, err = scripts.run()

    assert (out, len(hpctk.noted("call"))) == (printed, calls), err
    assert said in err


RELOADS = """
import importlib, pathlib
from hpc_toolkit import Executor
import work

SCALE = 1

def scaled(x):
    return SCALE * x

with Executor("runs/x", workers=1) as executor:
    first = executor.submit(work.f, 1).result()
    pathlib.Path("work.py").write_text("def f(x):\\n    return 'other'\\n")
    importlib.reload(work)
    print(first, executor.submit(work.f, 1).result())
    for SCALE in (1, 2, 3):
        print(executor.submit(scaled, 1).result())
"""


def test_workers_use_the_code_and_the_values_of_the_moment_of_a_call(hpctk: Hpctk) -> None:
    Path("work.py").write_text("def f(x):\n    return 'one'\n")

    _, out, err = Scripts(hpctk, RELOADS).run()

    assert out == "one other\n1\n2\n3\n", err


@pytest.mark.parametrize("documented", [Executor, Run], ids=lambda one: one.__name__)
def test_examples_of_docstrings_do_what_they_say(
    hpctk: Hpctk, monkeypatch: pytest.MonkeyPatch, documented: object
) -> None:
    Path("bench.py").write_text("def iterate(item):\n    return item\n")
    for name, value in hpctk.environment().items():
        monkeypatch.setenv(name, value)
    tests = [one for one in doctest.DocTestFinder().find(documented) if one.examples]
    runner = doctest.DocTestRunner()

    assert len(tests) == 1
    assert runner.run(tests[0]).failed == 0
