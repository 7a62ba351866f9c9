"""The process from which executors are forked, and the thread that prefetches."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.rundir.layout import StageSpec, WorkloadSpec
from hpc_toolkit.worker import forkserver, starting
from hpc_toolkit.worker.code import first_imports
from hpc_toolkit.worker.loading import Prefetch

FUNCTION = WorkloadSpec(function="mine:run", path=("/a",), argv=("x", "y"), options={"n": 1})
SPECS = {
    "first": StageSpec(name="first", workload=FUNCTION, timeout_s=2.5, max_items_per_process=3),
    "second": StageSpec(name="second", workload=WorkloadSpec(command="echo {i}"), pipefail=True),
}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}
STEP |= {"SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}


def order(stage: str = "first") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(starting._order(SPECS, Path("log"), stage))
    return found


def test_an_order_separates_what_is_the_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"CUDA_VISIBLE_DEVICES": "3", "SLURM_PROCID": "1", "PMI_RANK": "1"}
    for name, text in {**own, "LOCAL_RANK": "1", "RANK": "5", "SLURM_NTASKS": "8"}.items():
        monkeypatch.setenv(name, text)

    found = order()

    assert found["own"] == {**own, "HPCTK_LOCAL_RANK": "1"}
    assert found["environ"].keys() & {*own, "LOCAL_RANK", "RANK", "SLURM_NTASKS"} == {
        "SLURM_NTASKS"
    }


def test_only_a_function_of_the_user_has_a_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def packages(**work: Any) -> list[str]:
        return starting.packages_of(StageSpec(name="items", workload=WorkloadSpec(**work)))

    monkeypatch.setattr(starting, "_packages", {})
    (tmp_path / "mine.py").write_text("import numpy\nimport json\n")

    assert packages(function="mine:run", path=(str(tmp_path),)) == ["numpy", "json"]
    assert packages(function="hpc_toolkit.worker.calls:Calls") == []
    assert packages(command="true") == []


FIRST: dict[str, list[str]] = {
    "import numpy, scipy.stats": ["numpy", "scipy", "scipy.stats"],
    "from numpy import random": ["numpy", "numpy.random"],
    "'A text.'\nfrom __future__ import annotations\nX = {1: [2]}\nimport numpy": ["numpy"],
    "def f(a=1): g()\nclass C(f):\n    x: int = 3\n    def m(self): g()\nimport numpy": ["numpy"],
    "if TYPE_CHECKING:\n    import scipy\nimport numpy": ["numpy"],
    "if __name__ == '__main__':\n    f()\nimport numpy": ["numpy"],
    "try:\n    import scipy\nexcept ImportError:\n    x = None\nimport numpy": ["scipy", "numpy"],
    # What may come before an import matters to it.
    "import os\nos.environ['A'] = '1'\nimport numpy": [],
    "f()\nimport numpy": [],
    "x.y = 1\nimport numpy": [],
    "if x:\n    import scipy\nimport numpy": [],
    "for x in y:\n    pass\nimport numpy": [],
    "with x:\n    pass\nimport numpy": [],
    "@f()\ndef g(): pass\nimport numpy": [],
    "def g(x=f()): pass\nimport numpy": [],
    "class C:\n    x = f()\nimport numpy": [],
    "class C(metaclass=f):\n    pass\nimport numpy": [],
    "x = [y := f()]\nimport numpy": [],
    "del x\nimport numpy": [],
    "global x\nimport numpy": [],
    "import numpy\nf()\nimport scipy": ["numpy"],
    # The user's own files are read, and not imported.
    "import other\nimport scipy": ["numpy", "scipy"],
    "from package.part import x\nimport scipy": ["numpy", "scipy"],
    "from package import part": ["numpy"],
    "import acts\nimport scipy": ["numpy"],
    "import itself\nimport numpy": ["numpy"],
    "try:\n    import no_such_module\nexcept ImportError:\n    x = 1\nimport numpy": ["numpy"],
    # Parts of Python alone are fast.
    "import json, os.path": [],
    "import numpy\nfork_safe = False": [],
    "import numpy\nclass C:\n    fork_safe: bool = False": [],
    "import numpy (": [],
}


@pytest.mark.parametrize("source", FIRST)
def test_packages_are_those_that_come_before_other_code(source: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name, text in {
        "mine.py": source,
        "other.py": "import numpy\n",
        "itself.py": "import itself, mine\n",
        "acts.py": "import numpy\nprint()\n",
        "package/__init__.py": "",
        "package/part.py": "from .deep import x\n",
        "package/deep.py": "from . import __name__\nimport numpy\n",
    }.items():
        (tmp_path / name).write_text(text)

    found = first_imports(WorkloadSpec(function="mine:run", path=(str(tmp_path),)))

    assert [one for one in found if one.partition(".")[0] in {"numpy", "scipy"}] == FIRST[source]


def test_ranks_of_other_steps_and_nodes_do_not_meet() -> None:
    others = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURMD_NODENAME")
    names = [starting.step_name(STEP), *(starting.step_name({**STEP, one: "9"}) for one in others)]

    assert len({*names}) == len(names)
    assert all(name.startswith("\0hpctk-") for name in names)
    assert starting.step_name({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1"}) == ""
    assert starting.step_name({}) == ""


def test_the_second_rank_is_connected_to_the_first() -> None:
    import os

    name = f"\0hpctk-test-{os.getpid()}"
    listener, nobody = starting.meet(name)
    none, second = starting.meet(name)
    assert (nobody, none) == (None, None)
    assert listener is not None
    assert second is not None

    third, _ = listener.accept()
    assert forkserver.is_own(third)
    for one in (listener, second, third):
        one.close()

    again, _ = starting.meet(name)
    assert again is not None
    again.close()


LIMIT_S = 400.0


class Gated:
    """The test sees each call of ``prefetch`` and lets it return."""

    def __init__(self) -> None:
        self.begun: queue.Queue[Any] = queue.Queue()
        self.gate = threading.Semaphore(0)

    def prefetch(self, group: Any) -> None:
        self.begun.put(group)
        self.gate.acquire()


@pytest.fixture
def gated() -> Iterator[Gated]:
    workload = Gated()
    yield workload
    workload.gate.release(100)
    for thread in threading.enumerate():
        if thread.name == "prefetch":
            thread.join(LIMIT_S)


def test_a_call_that_takes_long_holds_nobody_up_and_the_group_named_last_is_next(
    gated: Gated,
) -> None:
    ahead = Prefetch()
    ahead.open()

    for group in "abc":
        ahead.name(gated, group)
        if group == "a":
            assert gated.begun.get(timeout=LIMIT_S) == "a"

    assert gated.begun.empty(), "two calls at once"
    gated.gate.release()
    assert gated.begun.get(timeout=LIMIT_S) == "c"
