"""Scripts that use the Python API: with real workers, killed, interrupted and started again."""

from __future__ import annotations

import doctest
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit import Executor, notebook
from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk, journal_lines, wait_until, workers_of

if TYPE_CHECKING:
    from hpc_toolkit.queue.log import StageLog

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
        process = self.start(*words)
        out, err = process.communicate()
        return process.returncode, out, err

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


def test_a_script_is_killed_and_the_same_script_continues(scripts: Scripts) -> None:
    first = scripts.start(2)
    wait_until(lambda: len(scripts.started()) > 3, "some calls")
    first.kill()
    first.communicate()

    assert scripts.run(2) == (0, PRINTED, "")
    run = each_has_one_result()
    before = journal_lines(run)

    assert scripts.run(2) == (0, PRINTED, "")
    assert journal_lines(run) == before


def test_a_worker_is_killed_and_the_script_does_not_notice(scripts: Scripts) -> None:
    script = scripts.start(2)
    words = wait_until(scripts.started, "a call")[0]
    os.kill(int(words[2]), signal.SIGKILL)

    assert script.communicate() == (PRINTED, "")
    run = each_has_one_result()
    assert len(workers_of(run)) == 3


def test_the_process_of_local_workers_is_killed_and_replaced(scripts: Scripts) -> None:
    script = scripts.start(1)
    words = wait_until(scripts.started, "a call")[0]
    status = Path(f"/proc/{words[2]}/status").read_text()
    os.kill(int(status.partition("PPid:")[2].split()[0]), signal.SIGKILL)

    assert script.communicate()[0] == PRINTED
    each_has_one_result()


def test_an_interrupted_script_leaves_its_calls_and_no_process(scripts: Scripts) -> None:
    first = scripts.start(1)
    wait_until(scripts.started, "a call")
    first.send_signal(signal.SIGINT)

    _, err = first.communicate()
    assert "KeyboardInterrupt" in err
    assert not Run.open("runs/x").status().stages["items"].sealed
    assert scripts.run(2) == (0, PRINTED, "")
    each_has_one_result()


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
    ("end", "code", "sealed"),
    [
        ("pass", 0, False),
        ("executor.shutdown(wait=False)", 0, True),
        ("sys.exit(3)", 3, False),
        ("1 / 0", 1, False),
    ],
)
def test_calls_are_in_the_run_however_the_script_ends(
    hpctk: Hpctk, end: str, code: int, sealed: bool
) -> None:
    Path("numbers_.py").write_text(TWICE)

    ended = Scripts(hpctk, ENDS.format(end)).run()

    assert ended[:2] == (code, 2 * REFUSED)
    log, args = calls_of_run()
    assert args == [[number] for number in range(200)]
    assert log.sealed is sealed


def test_calls_that_cannot_be_written_at_the_end_are_reported(hpctk: Hpctk) -> None:
    Path("numbers_.py").write_text(TWICE)

    made = 'executor = Executor("runs/x")\n'
    text = ENDS.replace(made, f'{made}    shutil.rmtree("runs/x")\n').replace("(200)", "(1)")

    err = Scripts(hpctk, text.format("atexit.unregister(late)")).run()[2]

    assert err.startswith("error: calls are not in the run: cannot read or write runs/x: ")


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


def test_workers_elsewhere_exit_when_the_script_has_sealed_the_run(
    scripts: Scripts, hpctk: Hpctk
) -> None:
    script = scripts.start(0)
    wait_until(lambda: Path("runs/x").exists(), "the run")

    assert hpctk("work", "runs/x", "--workers", 2).code == 0
    assert script.communicate() == (PRINTED, "")
    each_has_one_result()


def test_a_script_without_a_guard_is_told_so(hpctk: Hpctk) -> None:
    text = SCRIPT.replace('if __name__ == "__main__":', "if True:").replace("int(sys.argv[1])", "1")
    code, _, err = Scripts(hpctk, text.replace("range(12)", "range(1)")).run()

    assert code == 1
    assert "hpc_toolkit.errors.CallError: script:slow(0, trace='trace') failed after 3" in err
    assert "RunError: runs/x: a worker imports this script" in err
    assert "below if __name__ == '__main__':\n" in err


def test_workers_that_give_up_end_the_futures_with_their_reason(hpctk: Hpctk) -> None:
    text = SCRIPT.replace("range(12)", "range(60)").replace("time.sleep(0.2)", "1 / 0")
    script = Scripts(hpctk, text.replace('call.result()["square"]', "str(call.exception())"))
    code, out, _ = script.run(2)

    assert code == 0
    assert re.search("paused: the first .. items of stage 'items' all failed", out)


# submitit's object of the local job outlives the example, as in a notebook.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("documented", [Executor, Run, notebook], ids=lambda one: one.__name__)
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


def test_columns_of_a_run_are_a_data_frame(hpctk: Hpctk) -> None:
    run = hpctk.make([{"lr": 0.1}, {"lr": 0.2, "how": "segfault", "once": "once"}])
    assert hpctk("work", "run").code == 0

    frame = pytest.importorskip("pandas").DataFrame(run.columns())

    assert list(frame["lr"]) == [0.1, 0.2]
    assert list(frame["value.id"]) == [0, 1]
    assert set(frame["state"]) == {"done"}
    with run:
        assert run.status().complete
    assert run.results() == Run.open("run").results()
