"""The executor of futures: what it writes, what it refuses, and how its futures end."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_toolkit import Executor, background, calls
from hpc_toolkit.calls.recorded import key_of
from hpc_toolkit.errors import CallError, ConfigError, RunError, WorkloadError
from hpc_toolkit.queue import wants
from hpc_toolkit.run import Run
from hpc_toolkit.worker.calls import Calls
from hpc_toolkit.worker.fingerprints import fingerprint
from tests.toyrun import ToyWorker


def written(root: Path) -> list[dict[str, Any]]:
    """The calls of a run, each with its segment and its position there."""
    view = Run.open(root).view
    view.poll()
    return [
        {"entry": entry, "at": at, **json.loads(line)}
        for entry, segment in view.stages["items"].log.segments.items()
        for at, line in enumerate(segment.items())
    ]


def wait_for(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.005)


def answer(root: Path, argument: Any, kind: str = "done", repeat: int = 0, **fields: Any) -> None:
    """Finish a call, as a worker does, once it is written; short lists have units of one call."""
    while True:
        for call in written(root):
            if call["args"] == [argument] and call.get("repeat", 0) == repeat:
                worker = ToyWorker(Run.open(root).paths, f"w{call['entry']}-{call['at']}")
                assert worker.claim(f"{call['entry']:06d}-{call['at']}")
                worker.attempt(call["at"], kind, **fields)
                worker.release()
                return
        time.sleep(0.005)


def test_a_second_executor_returns_recorded_results_and_awaits_the_others(fast_dir: Path) -> None:
    root = fast_dir / "r"
    first = Executor(root)
    done = [first.submit(math.sqrt, number) for number in (4, 4, 9, 16)][:3]
    answer(root, 4, value=2.0)
    answer(root, 4, repeat=1, value=-2.0)
    answer(root, 9, "permanent")
    wait(done)
    first.shutdown(cancel_futures=True)

    with Executor(root) as again:
        one, other, failed, left, new = (again.submit(math.sqrt, n) for n in (4, 4, 9, 16, 25))
        assert (one.result(timeout=0), other.result(timeout=0)) == (2.0, -2.0)
        assert isinstance(failed.exception(timeout=0), CallError)
        assert not left.done()
        answer(root, 16, value=4.0)
        answer(root, 25, value=5.0)

    assert (left.result(), new.result()) == (4.0, 5.0)
    assert [call.get("repeat") for call in written(root)] == [None, 1, None, None, None]


@pytest.mark.parametrize("seal", [True, False])
def test_a_sealed_run_refuses_other_calls(fast_dir: Path, seal: bool) -> None:
    root = fast_dir / "r"
    with Executor(root, seal=seal) as executor:
        executor.submit(math.sqrt, 4)
        answer(root, 4, value=2.0)

    again = Executor(root, seal=seal)
    assert again.submit(math.sqrt, 4).result() == 2.0
    if seal:
        with pytest.raises(RunError, match=r"r is sealed, and does not have math:sqrt\(5\)"):
            again.submit(math.sqrt, 5)
    else:
        again.submit(math.sqrt, 5)
    again.shutdown(cancel_futures=True)


def test_a_run_of_something_else_is_refused(fast_dir: Path) -> None:
    Executor(fast_dir / "r", timeout_s=5).shutdown()
    Run.create(fast_dir / "other", [{"n": 1}], workload="math:sqrt")

    with pytest.raises(ConfigError, match="r was created with other timeout"):
        Executor(fast_dir / "r")
    with pytest.raises(ConfigError, match="other was created with other workload"):
        Executor(fast_dir / "other")
    for workers in (-1, 2.5, "2"):
        for given in ({"workers": workers}, {"max_workers": workers}):
            with pytest.raises(ValueError, match=f"workers must be 0 to 1024, got {workers!r}"):
                Executor(fast_dir / "r", **given)  # type: ignore[arg-type] # refused
    with pytest.raises(ConfigError, match="workers and max_workers are the same"):
        Executor(fast_dir / "r", 1, max_workers=1)
    with pytest.raises(ConfigError, match="on_change must be rerun, keep or error, got 'no'"):
        Executor(fast_dir / "r", timeout_s=5, on_change="no")  # type: ignore[arg-type] # refused


def test_the_end_of_a_script_leaves_workers_to_another_that_lives(fast_dir: Path) -> None:
    root = fast_dir / "r"
    script = f"""
import sys
from hpc_toolkit import Executor
executor = Executor({str(root)!r})
print("began", flush=True)
sys.stdin.readline()
executor.shutdown()
"""

    def requests() -> int:
        with Executor(root) as executor:
            number = len(written(root)) + 1
            future = executor.submit(math.sqrt, number)
            answer(root, number, value=1.0)
            future.result()
        return len(list((root / "control").iterdir()))

    Executor(root).shutdown()
    ToyWorker(Run.open(root).paths, "elsewhere")
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert requests() == 0
        other.kill()
        other.wait()
        assert requests() == 1  # its process is gone
    (silent,) = (root / "calls").glob("*.script")
    silent.write_text(json.dumps(["another host", "boot", 1, 1]))
    assert requests() == 1
    os.utime(silent, (0, 0))
    assert requests() == 2


def old_code(number: int, how: str) -> int:
    return number


def new_code(number: int, how: str) -> int:
    return number + 1


new_code.__qualname__ = new_code.__name__ = "old_code"


def test_calls_of_earlier_code_that_were_not_started_are_withdrawn(
    fast_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = fast_dir / "r"
    first = Executor(root)
    first.map(old_code, range(30), ["x"] * 30)
    wait_for(lambda: written(root))
    started = ToyWorker(Run.open(root).paths, "started")
    assert started.claim("000001-0")
    living = Executor(root)
    living.submit(new_code, 1, "y")
    wait_for(lambda: len(written(root)) >= 31)
    assert Run.open(root).status().stages["items"].failed == 0  # the first script waits for them
    living.shutdown(cancel_futures=True)
    first.shutdown(cancel_futures=True)

    again = Executor(root)
    future = again.submit(new_code, 1, "y")
    view = Run.open(root).view
    view.poll()
    failed = 30 - len(view.stages["items"].unit("000001-0").items)
    wait_for(lambda: Run.open(root).status().stages["items"].failed == failed)

    assert "paused" not in Run.open(root).status().reason
    assert not future.done()
    again.submit(old_code, 29, "x")  # which somebody wants again
    wait_for(lambda: len(written(root)) >= 32)
    again.shutdown(cancel_futures=True)
    said = f"old_code changed: {failed} calls of the code before were not started, and do not run"
    assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_an_executor_takes_no_calls_in_a_forked_process(fast_dir: Path) -> None:
    executor = Executor(fast_dir / "r")
    executor._changed.acquire()  # as its thread may, at this moment

    if (child := os.fork()) == 0:
        with contextlib.suppress(RuntimeError), executor:
            executor.submit(math.sqrt, 4)
            os._exit(1)
        background._write_all()  # as at the end of the interpreter
        os._exit(0)

    executor._changed.release()
    assert os.waitpid(child, 0)[1] == 0
    executor.submit(math.sqrt, 9)
    executor.shutdown(cancel_futures=True)


class Partial(functools.partial[Any]):
    """May do something else when it is called."""


def nested() -> Any:
    def inside() -> None:
        pass

    return inside


@pytest.mark.parametrize(
    ("function", "name", "stored"),
    [
        (math.sqrt, "math:sqrt", set()),
        (Partial, f"{__name__}:Partial", {"same"}),
        (nested, f"{__name__}:nested", {"same"}),
        (lambda: 1, f"{__name__}:<lambda>", {"same", "types", "file"}),
        (nested(), f"{__name__}:nested.<locals>.inside", {"same", "types", "file"}),
        ("abc".upper, "builtins:str.upper", {"same", "types", "file"}),
        (Partial(math.sqrt, 4), f"{__name__}:Partial", {"same", "types", "file"}),
    ],
)
def test_functions_that_workers_can_import_go_by_name_and_others_are_stored(
    tmp_path: Path, function: Any, name: str, stored: set[str]
) -> None:
    caller = calls.Caller(tmp_path / "calls")
    call = caller.call(function, (), {})
    caller.store(call)

    assert call.item["function"] == name
    assert {key for key, value in call.item.get("stored", {}).items() if value} == stored
    assert (tmp_path / "calls").exists() is ("file" in stored)


def test_what_is_not_a_function_or_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    caller = calls.Caller(tmp_path / "calls")
    with pytest.raises(ConfigError, match="5 is not a function"):
        caller.call(5, (), {})

    lock = threading.Lock()
    with pytest.raises(ConfigError, match="<lambda>: 'lock' in the function is a lock, which can"):
        caller.store(caller.call(lambda: lock, (), {}))
    with pytest.raises(ConfigError, match=r"math:sqrt: argument 2\[0\] is a lock, which cannot be"):
        caller.store(caller.call(math.sqrt, (1, [lock]), {}))
    with pytest.raises(ConfigError, match="math:sqrt: x is a lock, which cannot be stored"):
        caller.store(caller.call(math.sqrt, (), {"x": lock}))


def test_a_function_that_is_async_is_refused(tmp_path: Path) -> None:
    async def work() -> int:
        return 1

    with (
        Executor(tmp_path / "run", workers=None) as executor,
        pytest.raises(WorkloadError, match="work is async or has a yield"),
    ):
        executor.submit(work)


def test_what_calls_share_is_stored_once_and_large_functions_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caller, array = calls.Caller(tmp_path / "calls"), np.arange(200_000.0)
    for number in range(5):
        caller.store(caller.call(len, (array, {"number": array}), {}))
        caller.store(caller.call(lambda x: x + 1, (number,), {}))
    (file,) = (tmp_path / "calls").iterdir()
    assert array.nbytes < file.stat().st_size < array.nbytes + 10_000
    assert capsys.readouterr().err == ""

    caller.store(caller.call(lambda: array, (), {}))
    assert "<lambda> takes 1.5 MiB with what it refers to; pass large" in capsys.readouterr().err


def test_arrays_are_looked_at_once_only_if_they_cannot_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []

    def look(content: Any) -> tuple[str, str]:
        looks.append(1)
        return fingerprint(content)

    monkeypatch.setattr(calls, "fingerprint", look)
    caller, base = calls.Caller(tmp_path / "calls"), np.arange(20_000.0)

    def frozen(array: Any) -> Any:
        array.flags.writeable = False
        return array

    def key(array: Any) -> bytes:
        call = caller.call(len, (array,), {"also": [array]})
        caller.store(call)
        return key_of(call.item)

    for array, count in (
        (frozen(base.copy())[::2], 1),
        (np.frombuffer(base.tobytes()), 1),
        (base.copy(), 6),
        (frozen(base[:]), 6),
        (frozen(np.array([*range(99), None])), 6),
    ):
        looks.clear()
        assert len({key(array) for _ in range(3)}) == 1
        assert len(looks) == count
    array, known = frozen(base.copy()), len(calls._fixed)
    before = key(array)
    array.flags.writeable = True
    array[0] = 5
    assert before != key(array) == key(frozen(array)) != key(base)
    assert len(calls._fixed) == known + 1
    del array
    assert len(calls._fixed) == known


def test_tensors_reach_the_function_as_they_were(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    marked = torch.ones(2)
    marked.mark = 5
    given = [
        torch.ones(3, requires_grad=True),
        torch.ones(70_000, dtype=torch.bfloat16, requires_grad=True),
        torch.ones(()),
        marked,
    ]
    caller = calls.Caller(tmp_path / "calls")
    call = caller.call(list, (given,), {})
    caller.store(call)

    (found,) = Calls(str(tmp_path)).run(None, [json.loads(json.dumps(call.item))])

    for one, other in zip(found, given, strict=True):
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        assert vars(one) == vars(other)
        assert torch.equal(one, other)
    plain = caller.call(list, ([one.detach() for one in given[:2]],), {})
    assert key_of(plain.item) != key_of(caller.call(list, (given[:2],), {}).item)


def test_a_run_that_disappears_ends_the_futures(fast_dir: Path) -> None:
    executor = Executor(fast_dir / "r")
    future = executor.submit(math.sqrt, 4)
    wait_for(lambda: executor._waiting)

    (fast_dir / "r").rename(fast_dir / "elsewhere")

    with pytest.raises(RunError, match=r"No such file or directory: '.*r/run.json'"):
        future.result(timeout=60)


def test_calls_with_needs_take_arguments_that_wait_for_other_calls(fast_dir: Path) -> None:
    root = fast_dir / "r"
    # A retry that raises a need lets calls have needs of their own.
    longer = {"on": "timeout", "time": "+1h", "up_to": "3h"}
    executor = Executor(root, timeout_s=3600, retry=longer)
    first = executor.submit(math.sqrt, 16)
    threading.Thread(target=answer, args=(root, 16), kwargs={"value": 4.0}, daemon=True).start()
    large = executor.with_needs(memory="1G")
    with pytest.raises(ConfigError, match="chunksize must be at least 1, got 0"):
        large.map(math.sqrt, [1], chunksize=0)

    # The lock of the executor, in which all calls are written as one segment, must be free here.
    found = large.map(math.sqrt, (first.result(timeout=30) for _ in range(2)))

    answer(root, 4.0, value=2.0)
    answer(root, 4.0, repeat=1, value=2.0)
    assert list(found) == [2.0, 2.0]
    executor.shutdown(cancel_futures=True)


def test_calls_with_more_different_needs_than_a_segment_takes_are_all_written(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_WANTS", 2)
    monkeypatch.setattr(wants, "MOST_WANTS", 2)
    executor = Executor(fast_dir / "r", needs={"memory": "1G"})
    with executor._changed:  # so that all of them wait to be written
        executor.submit(math.sqrt, 0)
        for number in (1, 2, 3, 3, 1):
            executor.with_needs(memory=f"{number}G").submit(math.sqrt, number)
        executor.submit(math.sqrt, 6)

    wait_for(lambda: len(written(fast_dir / "r")) >= 7)

    found = written(fast_dir / "r")
    assert [call["args"][0] for call in found] == [0, 1, 2, 3, 3, 1, 6]
    assert [call["entry"] for call in found] == [1, 1, 1, 2, 2, 2, 2]
    executor.shutdown(cancel_futures=True)
