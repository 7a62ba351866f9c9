"""Scripts that use the backend of joblib, interrupted and repeated, and joblib's own tests."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.realrun import REPOSITORY, Hpctk, wait_until
from tests.integration.test_executor import Scripts

pytest.importorskip("joblib")

HEAD = """
import multiprocessing, os, random, threading, time
import joblib
import hpc_toolkit.joblib
from joblib import Parallel, delayed


def noted(kind, number):
    fd = os.open("trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{kind} {number}\\n".encode())
    os.close(fd)


def square(number, seconds=0.0):
    noted("start", number)
    time.sleep(seconds)
    return number * number


def draw():
    noted("start", "draw")
    return random.random()


def invert(number):
    noted("start", f"invert{number}")
    return 1 / number


def config(n_jobs=2, **more):
    return joblib.parallel_config(backend="hpctk", n_jobs=n_jobs, run="runs/x", **more)


if __name__ == "__main__":
"""


def script(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines())


def counts(hpctk: Hpctk) -> dict[str, int]:
    """How often each call began."""
    found: dict[str, int] = {}
    for _, name in hpctk.noted("start"):
        found[name] = found.get(name, 0) + 1
    return found


EQUAL: dict[str, tuple[str, str, dict[str, int]]] = {
    "a generator gives results in order, an unordered one as they end": (
        """
with config():
    print([*Parallel(return_as="generator")(delayed(square)(one, 0.2 - one / 10)
                                            for one in range(3))])
    print(sorted(Parallel(return_as="generator_unordered")(delayed(square)(one)
                                                           for one in (4, 5))))
""",
        "[0, 1, 4]\n[16, 25]\n",
        {"0": 1, "1": 1, "2": 1, "4": 1, "5": 1},
    ),
    "sizes of batches do not matter for what a call is": (
        """
for size in (1, 7, "auto"):
    hpc_toolkit.joblib._positions.clear()
    with config():
        print(sum(Parallel(batch_size=size, pre_dispatch="all")(delayed(square)(one)
                                                                for one in range(20))))
""",
        "2470\n" * 3,
        {str(one): 1 for one in range(20)},
    ),
    "what a call runs in parallel runs in threads of its worker": (
        """
def outer(number):
    own = Parallel(n_jobs=2)(delayed(os.getpid)() for _ in range(4))
    with config(n_jobs=2):
        again = Parallel()(delayed(os.getpid)() for _ in range(4))
    return {*own, *again} == {os.getpid()}, joblib.cpu_count(), os.environ["MKL_NUM_THREADS"]
with config(inner_max_num_threads=3):
    print({*Parallel()(delayed(outer)(one) for one in range(3))})
with config(n_jobs=64, workers=1):
    print(Parallel(prefer="threads")(delayed(threading.get_native_id)() for _ in range(3))
          and Parallel(require="sharedmem")(delayed(os.getpid)() for _ in range(2))
          == [os.getpid()] * 2)
""",
        "{(True, 1, '3')}\nTrue\n",
        {},
    ),
    "calls of a failed Parallel are the same in its repetition, but not those that failed": (
        """
def flaky(number):
    noted("start", number)
    if number == 1 and not os.path.exists("fixed"):
        open("fixed", "w").close()
        raise OSError("once")
    return number
with config():
    for _ in range(2):
        try:
            print(Parallel(pre_dispatch=1, batch_size=1)(delayed(flaky)(one) for one in range(3)))
        except OSError as error:
            print(error)
""",
        "once\n[0, 1, 2]\n",
        {"0": 1, "1": 2, "2": 1},
    ),
    "an argument that cannot be stored fails its Parallel": (
        """
with config():
    try:
        Parallel()(delayed(square)(threading.Lock()) for _ in range(3))
    except ValueError as error:
        print("lock" in str(error))
    print(Parallel()(delayed(square)(one) for one in (1, 2)))
try:
    Parallel(n_jobs=2, backend="hpctk")(delayed(square)(one) for one in (1, 2))
except ValueError as error:
    print(error)
""",
        "True\n[1, 4]\nthe backend hpctk of joblib needs the directory of a run\n",
        {"1": 1, "2": 1},
    ),
    "a large argument is compared once in a Parallel, and stored once": (
        """
import numpy
with config():
    for more in (0, 1):
        shared = numpy.full(200_000, 1.0 + more)
        with Parallel() as parallel:
            for _ in range(2):
                sums = parallel(delayed(numpy.sum)(shared, where=shared > at) for at in range(2))
                print([round(one / 1e5) for one in sums])
                shared += 1
print(sum(one.stat().st_size for one in __import__("pathlib").Path("runs/x/calls").iterdir()
          if one.suffix == ".values") // 1_600_000)
""",
        "[2, 0]\n[4, 4]\n[4, 4]\n[6, 6]\n3\n",
        {},
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_script_prints_the_same_when_it_is_started_again(hpctk: Hpctk, name: str) -> None:
    body, printed, begun = EQUAL[name]
    scripts = Scripts(hpctk, script(body))

    first, second = scripts.run(), scripts.run()

    assert first[0] == 0, first
    assert first[1].startswith(printed), first
    assert counts(hpctk) == begun
    if "fixed" not in body:
        assert second[:2] == first[:2]


def test_an_interrupted_script_ends_and_leaves_its_calls(hpctk: Hpctk) -> None:
    body = "with config():\n    print(Parallel()(delayed(square)(one, 0.5) for one in range(8)))"
    scripts = Scripts(hpctk, script(body))
    first = scripts.start()
    wait_until(lambda: len(hpctk.noted("start")) > 3, "some calls")
    first.send_signal(signal.SIGINT)

    assert "KeyboardInterrupt" in first.communicate()[1]
    assert scripts.run()[:2] == (0, f"{[one**2 for one in range(8)]}\n")
    assert set(counts(hpctk).values()) == {1}


def test_a_timeout_is_raised_and_the_next_parallel_has_workers(hpctk: Hpctk) -> None:
    body = """
with config():
    try:
        Parallel(timeout=1)(delayed(square)(one, 3) for one in range(2))
    except multiprocessing.TimeoutError as error:
        print(type(error).__name__)
    print(Parallel()(delayed(square)(one) for one in (4, 5)))
"""
    code, out, _ = Scripts(hpctk, script(body)).run()

    assert (code, out) == (0, "TimeoutError\n[16, 25]\n")


def test_workers_come_from_elsewhere(hpctk: Hpctk) -> None:
    # The script ends while the thread that gave it the last result still reads rows.
    body = """
from hpc_toolkit.background import Background
def settle(*args, known=Background._settle):
    known(*args)
    time.sleep(0.2)
Background._settle = settle
with config(workers=0):
    print(Parallel()(delayed(square)(one) for one in (4, 5)))
"""
    process = Scripts(hpctk, script(body)).start()
    wait_until(Path("runs/x/run.json").exists, "the run")
    worker = hpctk.start("work", "runs/x")

    assert process.communicate()[0] == "[16, 25]\n"
    assert worker.ended().code in (0, 75)  # the script asks it to exit


SKLEARN = """
import numpy as np
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.inspection import permutation_importance
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, cross_val_score
X, y = make_classification(200, 6, random_state=0)
grid = GridSearchCV(LogisticRegression(), {"C": [0.1, 1.0, 10.0]}, cv=3)
several = {"C": np.logspace(-2, 2)}
drawn = RandomizedSearchCV(LogisticRegression(), several, n_iter=3, random_state=0)
def results():
    yield grid.fit(X, y).cv_results_["mean_test_score"].tolist()
    yield drawn.fit(X, y).best_params_["C"].item()
    yield cross_val_score(RandomForestClassifier(4, random_state=0, n_jobs=2), X, y).tolist()
    found = permutation_importance(grid.best_estimator_, X, y, random_state=0)
    yield found.importances_mean.tolist()
    yield RandomForestClassifier(4, random_state=0).fit(X, y).score(X, y)
own = [*results()]
with config():
    print([*results()] == own)
print(len(hpc_toolkit.Run.open("runs/x").results(partial=True)))
"""


@pytest.mark.soak  # its processes import scikit-learn
@pytest.mark.slow
def test_scikit_learn_gives_equal_results_and_finds_them_again(hpctk: Hpctk) -> None:
    pytest.importorskip("sklearn")
    scripts = Scripts(hpctk, script(SKLEARN))

    # 3 x 3 fits, 3 x 5, 5 folds and 6 columns; a forest prefers threads, and makes no call.
    expected: Any = (0, "True\n35\n")
    assert scripts.run()[:2] == expected
    assert scripts.run()[:2] == expected


# Each backend has a run of its own: calls that a test leaves would be made first in the next one.
REGISTERS = """
import os
import tempfile

from joblib import parallel

from hpc_toolkit.joblib import HpctkBackend as _Backend


class HpctkBackend(_Backend):
    default_n_jobs = 1  # as all of joblib's backends

    def __init__(self, **settings):
        run = os.path.join(tempfile.mkdtemp(dir=os.environ["RUNS_OF_TESTS"]), "run")
        super().__init__(**{"run": run, **settings})


parallel.BACKENDS["hpctk"] = HpctkBackend
"""
CONFTEST = """
from joblib import parallel

parallel.BACKENDS.pop("loky")
parallel.DEFAULT_BACKEND = parallel.DEFAULT_PROCESS_BACKEND = "hpctk"


def pytest_configure(config):
    config.addinivalue_line("markers", "thread_unsafe: of joblib")
"""
INTERNALS = "it looks at attributes of loky, or for its class of errors"
NOT_PASSED = {
    "test_nested_parallel_warnings": "nested calls run in threads or one by one, with no warning",
    "test_parallel_as_context_manager": INTERNALS,
    "test_error_capture": INTERNALS,
    "test_parallel_pickling": "the error is a ConfigError, not a PicklingError",
    "test_dispatch_multiprocessing": "proxies of multiprocessing need its key in the workers",
    "test_auto_memmap_on_arrays_from_generator": "arrays are copies, not maps of files",
    "test_memmapping_leaks": "arrays are copies, not maps of files",
    "test_multiple_generator_call_separated_gc": "it expects an error that only loky raises",
    "test_initializer": "workers have no initializer",
    "test_parallel_with_interactively_defined_bound_method_loky": "it looks for a log of loky",
}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_joblibs_own_tests_pass(tmp_path: Path) -> None:
    found = importlib.util.find_spec("joblib.test.test_parallel")
    if found is None or found.origin is None:
        pytest.skip("joblib is installed without its tests")
    source = Path(found.origin).read_text().replace('"loky"', '"hpctk"')
    source = source.replace("    LokyBackend,\n", "", 1)
    known = "    register_parallel_backend,\n)\n"
    assert known in source
    source = source.replace(known, f'{known}\nLokyBackend = BACKENDS["hpctk"]\n', 1)
    (tmp_path / "site").mkdir()
    (tmp_path / "runs").mkdir()
    # Also in processes that the tests start.
    (tmp_path / "site/sitecustomize.py").write_text(REGISTERS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_own.py").write_text(source)
    chosen = "(hpctk or not (threading or multiprocessing or sequential))"
    chosen += f" and not ({' or '.join(NOT_PASSED)})"

    words = ("-m", "pytest", "-q", "-k", chosen, "--tb=short", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, *words],
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path / 'site'}:{REPOSITORY}",
            "RUNS_OF_TESTS": str(tmp_path / "runs"),
        },
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 350
