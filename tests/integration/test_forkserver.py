"""Executors are forked from a process that has imported their packages, where that is safe."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk, Started, wait_until

HEAVY = """
import os, signal, sys, threading
with open("imports", "a") as file:
    print(os.readlink("/proc/self"), file=file)
"""
BEGINNING = """
import heavy
import os, random, signal, sys, time
"""
RUN = """
def run(item):
    with open("items", "a") as file:
        print(os.getpid(), file=file)
    return main(item)
"""
DIES = """
def main(item):
    if not os.path.exists(f"died-{item['id']}"):
        open(f"died-{item['id']}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""
FRESH = ("--max-items-per-process", 1)
NOTE = "note: each executor imports packages itself"


@pytest.fixture(autouse=True)
def packages(hpctk: Hpctk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of installed packages, of which the tests make one called heavy."""
    directory = hpctk.cwd / "site-packages"
    directory.mkdir()
    monkeypatch.setattr(hpctk, "python_path", f"{directory}:{hpctk.python_path}")


def make(
    hpctk: Hpctk, main: str, items: int = 6, *words: object, package: str = "", first: str = ""
) -> Run:
    """A run of a module that gets its contents afterwards: it is imported also by 'init'."""
    Path("mine.py").write_text("def run(item): pass\n")
    lines = "".join(f'{{"id": {number}}}\n' for number in range(items))
    words = (*words, "--items-per-claim", 1)
    made = hpctk("init", "run", "--workload", "mine:run", "--items", "-", *words, stdin=lines)
    assert made.code == 0, made.err
    Path("site-packages/heavy.py").write_text(f"{HEAVY}{package}")
    Path("mine.py").write_text(f"{first}{BEGINNING}{main}{RUN}")
    return Run.open("run")


def pids(name: str) -> list[int]:
    return [int(word) for word in Path(name).read_text().split()]


@pytest.mark.parametrize("pool", [["--workers", 3], []])
def test_one_import_serves_all_executors_however_often_they_die(
    hpctk: Hpctk, pool: list[object]
) -> None:
    run = make(hpctk, DIES, package="print('imported')\n")

    ended = hpctk("work", "run", *pool)

    assert (ended.code, NOTE in ended.err) == (0, False)
    assert [row["state"] for row in run.results()] == ["done"] * 6
    assert len(pids("imports")) == 1
    assert len(set(pids("items"))) >= 6
    logs = [path.read_text() for path in run.paths.logs.iterdir()]
    assert "".join(logs).count("imported") == 1


UNSAFE = {
    "its import starts threads": "threading.Timer(99, print).start()",
    "its import leaves": "kept = open('imports')",
    "its import starts processes": "import subprocess; subprocess.Popen(['sleep', '99'])",
    "its import initialises CUDA": (
        "from types import SimpleNamespace as fake\n"
        "sys.modules['torch'] = fake(cuda=fake(is_initialized=lambda: True))"
    ),
    "its import reads HPCTK_LOCAL_RANK": "os.environ.get('HPCTK_LOCAL_RANK')",
    "its import starts a timer": "signal.setitimer(signal.ITIMER_REAL, 99)",
    "its import leaves /dev/zero (deleted)": "import mmap; shared = mmap.mmap(-1, 99)",
}


@pytest.mark.parametrize("why", UNSAFE)
def test_each_executor_imports_a_package_with_which_a_fork_is_unsafe(
    hpctk: Hpctk, why: str
) -> None:
    run = make(hpctk, DIES, 3, package=f"{UNSAFE[why]}\n")

    ended = hpctk("work", "run", "--workers", 2)

    assert ended.code == 0
    assert [row["state"] for row in run.results()] == ["done"] * 3
    assert set(pids("items")) <= set(pids("imports"))
    assert ended.err.count(NOTE) == ended.err.count(f"{NOTE}: {why}") >= 1


@pytest.mark.parametrize("first", ["fork_safe = False\n", "import os\nos.environ['X'] = '1'\n"])
def test_each_executor_imports_what_must_not_come_first(hpctk: Hpctk, first: str) -> None:
    run = make(hpctk, DIES, 3, package="x = os.environ.get('X')\n", first=first)

    ended = hpctk("work", "run", "--workers", 2)

    assert (ended.code, NOTE in ended.err) == (0, False)
    assert [row["state"] for row in run.results()] == ["done"] * 3
    assert set(pids("items")) <= set(pids("imports"))


def test_a_fork_server_that_is_killed_is_replaced(hpctk: Hpctk) -> None:
    """By each worker that needs one after that; executors that it had forked go on."""
    kill = """
def main(item):
    if item["id"] % 2 == 0 and not os.path.exists(f"died-{item['id']}"):
        open(f"died-{item['id']}", "w").close()
        os.kill(heavy.server, signal.SIGKILL)
        if item["id"] % 4:
            os.kill(os.getpid(), signal.SIGKILL)
"""
    run = make(hpctk, kill, 8, package="server = int(os.readlink('/proc/self'))\n")

    ended = hpctk("work", "run", "--workers", 1)

    assert (ended.code, NOTE in ended.err) == (0, False)
    assert [row["state"] for row in run.results()] == ["done"] * 8
    assert [row["attempts"] for row in run.results()] == [1] * 8
    # Two executors died with the fork server, and the others did not notice its end.
    assert len(pids("imports")) == 3


def test_what_the_module_imports_is_imported_again_when_it_changed(hpctk: Hpctk) -> None:
    Path("other.py").write_text("VALUE = 1\n")
    change = "\n        open('other.py', 'w').write('VALUE = 22  ')\n        os.kill("
    main = DIES.replace("\n        os.kill(", change) + "    return other.VALUE\n"
    run = make(hpctk, main, 2, first="import other\n")

    assert hpctk("work", "run").code == 0

    assert {row["value"] for row in run.results()} == {22}


def test_executors_differ_in_what_is_their_own(hpctk: Hpctk) -> None:
    main = """
os.environ["RANK"], os.environ["MINE"] = "7", "x"
generator = numpy.random.default_rng()
def main(item):
    time.sleep(0.2)
    names = ("HPCTK_LOCAL_RANK", "RANK", "LOCAL_RANK", "MINE", "CUDA_VISIBLE_DEVICES")
    numbers = [random.random(), float(numpy.random.rand()), float(generator.random())]
    return [os.getppid(), {name: os.environ.get(name) for name in names}, numbers]
"""
    run = make(hpctk, main, 8, first="import numpy\n")

    ended = hpctk("work", "run", "--workers", 2, env={"CUDA_VISIBLE_DEVICES": "4,5"})

    assert (ended.code, len(pids("imports"))) == (0, 1)
    values = [row["value"] for row in run.results()]
    found = {guard: environ for guard, environ, _ in values}
    ranks = sorted(one["HPCTK_LOCAL_RANK"] for one in found.values())
    assert ranks == [str(number) for number in range(len(found))]
    for environ in found.values():
        assert (environ["RANK"], environ["LOCAL_RANK"], environ["MINE"]) == ("7", None, "x")
        assert environ["CUDA_VISIBLE_DEVICES"] == "45"[int(environ["HPCTK_LOCAL_RANK"])]
    numbers = [number for *_, some in values for number in some]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(("seed", "different"), [("", 4), ("(1)", 1)])
def test_each_executor_has_its_own_random_numbers_unless_the_module_seeds_them(
    hpctk: Hpctk, seed: str, different: int
) -> None:
    pytest.importorskip("torch")
    seeds = ("random.seed", "numpy.random.seed", "torch.manual_seed") if seed else ()
    main = "".join(f"{one}{seed}\n" for one in seeds)
    main += "def main(item): return random.random(), numpy.random.rand(), torch.rand(1).item()\n"
    run = make(hpctk, main, 4, *FRESH, first="import numpy\nimport torch\n")

    ended = hpctk("work", "run")

    assert (ended.code, len(pids("imports")), NOTE in ended.err) == (0, 1, False)
    for drawn in zip(*(row["value"] for row in run.results()), strict=True):
        assert len(set(drawn)) == different


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_workers_whose_threads_are_bound_do_not_share_an_import(hpctk: Hpctk) -> None:
    run = make(hpctk, "def main(item):\n    time.sleep(0.2)\n", 4)

    ended = hpctk(
        *("work", "run", "--workers", 2, "--cpus-per-worker", 1), env={"OMP_PROC_BIND": "true"}
    )

    assert (ended.code, len(list(run.results()))) == (0, 4)
    assert ended.err.count(f"{NOTE}: OMP_PROC_BIND binds threads") == 1


def test_an_import_has_the_memory_of_a_worker(hpctk: Hpctk) -> None:
    make(hpctk, "def main(item): pass\n", package=f"much = bytes({1 << 30})\n")

    ended = hpctk("work", "run", env={"HPCTK_MEMORY_PER_WORKER": str(1 << 29)})

    assert ended.code == 1
    assert "cannot be imported: MemoryError" in ended.err


@pytest.mark.parametrize("pool", [["--workers", 2], []])
def test_no_process_outlives_a_killed_worker(hpctk: Hpctk, pool: list[object]) -> None:
    make(hpctk, "def main(item):\n    time.sleep(600)\n", 2)
    started = hpctk.start("work", "run", *pool, "--grace", "0s")
    wait_until(Path("items").exists, "item", of=started)

    os.kill(started.pid, signal.SIGKILL)
    started.process.wait()

    assert not hpctk.leftovers()


def test_a_worker_can_be_stopped_while_its_module_is_imported(hpctk: Hpctk) -> None:
    """No process that the import has started is left."""
    waits = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    waits += (
        "with open('imports', 'a') as file: print(file=file)\nsubprocess.run(['sleep', '600'])\n"
    )
    make(hpctk, "def main(item): pass\n", 2, package=waits)
    started = hpctk.start("work", "run", "--workers", 2, "--grace", "0s")
    wait_until(
        lambda: Path("imports").exists() and Path("imports").read_text().count("\n") > 1,
        "import",
        of=started,
    )

    os.kill(started.pid, signal.SIGTERM)

    assert started.ended().code == 75
    assert not hpctk.leftovers()


def ranks(hpctk: Hpctk, count: int, *changes: dict[str, str]) -> list[Started]:
    """Workers as srun starts them for a step of one node."""
    step = {"SLURM_JOB_ID": f"{os.getpid()}", "SLURM_STEP_ID": "0", "SLURM_NTASKS": f"{count}"}
    step |= {"SLURM_STEP_NUM_TASKS": f"{count}", "SLURM_STEP_TASKS_PER_NODE": f"{count}"}
    step |= {"SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
    return [
        hpctk.start(
            *("work", "run", "--idle-exit", "100s"),
            env={
                **step,
                "SLURM_PROCID": f"{rank}",
                "SLURM_LOCALID": f"{rank}",
                **dict(*changes[rank : rank + 1]),
            },
        )
        for rank in range(count)
    ]


RANKED = """
def main(item):
    open(f"rank-{os.environ['SLURM_PROCID']}", "w").close()
    while sum(name.startswith("rank-") for name in os.listdir()) < 3: time.sleep(0.01)
    if not os.path.exists(f"died-{item['id']}"):
        open(f"died-{item['id']}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    names = ("SLURM_PROCID", "HPCTK_LOCAL_RANK", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES")
    return [os.environ.get(name) for name in names]
"""


def test_ranks_of_a_step_share_one_import(hpctk: Hpctk) -> None:
    run = make(hpctk, RANKED, 6)
    gpus = [{"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(3)]

    ended = [one.ended() for one in ranks(hpctk, 3, *gpus)]

    assert [(one.code, NOTE in one.err) for one in ended] == [(0, False)] * 3
    assert len(pids("imports")) == 1
    values = {tuple(row["value"]) for row in run.results()}
    job = str(os.getpid())
    assert values == {(str(rank), None, job, str(rank)) for rank in range(3)}


def test_a_rank_whose_environment_differs_imports_the_module_itself(hpctk: Hpctk) -> None:
    run = make(hpctk, RANKED, 6)

    ended = [one.ended() for one in ranks(hpctk, 3, {}, {}, {"OMP_NUM_THREADS": "3"})]

    assert [one.code for one in ended] == [0] * 3
    assert f"{NOTE}: OMP_NUM_THREADS differs from that" in "".join(one.err for one in ended)
    assert len(pids("imports")) > 1
    assert {row["state"] for row in run.results()} == {"done"}


def test_ranks_go_on_when_the_first_one_is_killed(hpctk: Hpctk) -> None:
    """Whose child the fork server is; items of the others are not interrupted."""
    main = """
def main(item):
    while not os.path.exists("go"): time.sleep(0.01)
    return os.getpid()
"""
    run = make(
        hpctk, main, 6, package="parent = os.getppid()\nopen('parent', 'w').write(str(parent))\n"
    )
    started = ranks(hpctk, 3)
    wait_until(lambda: Path("items").exists() and len(pids("items")) == 3, "items")

    os.kill(int(Path("parent").read_text()), signal.SIGKILL)
    Path("go").touch()

    assert sorted(one.ended().code for one in started) == [-9, 0, 0]
    assert {row["state"] for row in run.results()} == {"done"}
    assert [row["attempts"] for row in run.results()] == [1] * 6


@pytest.mark.parametrize("module", ["torch", "sklearn.linear_model"])
def test_common_libraries_can_be_forked(hpctk: Hpctk, module: str) -> None:
    """Their own threads, which numpy starts at its import, prepare for a fork."""
    pytest.importorskip(module)
    product = "numpy.ones((300, 300)) @ numpy.ones((300, 300))"
    main = f"def main(item):\n    return float(({product}).sum())\n"
    run = make(hpctk, main, 2, *FRESH, first=f"import numpy, {module}\n")

    ended = hpctk("work", "run", env={"OMP_NUM_THREADS": "2"})

    assert (ended.code, len(pids("imports")), ended.err.count(NOTE)) == (0, 1, 0)
    assert {row["value"] for row in run.results()} == {300.0**3}
