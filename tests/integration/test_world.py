"""What user code finds around it: each item the same, as in a script, and nothing of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk, journal_lines, rows_by_id

MOVING = """
import ctypes
import os
import pickle
import tempfile
import time


def umask():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def moving(item):
    found = {"cwd": os.path.basename(os.getcwd()), "umask": umask()}
    if item["does"] == "native":
        assert pickle.loads(pickle.dumps(os.chdir)) is os.chdir in os.supports_fd
        library = ctypes.CDLL(None)
        library.umask(0o777)
        library.chdir(b"/")
        time.sleep(0.01)
        return found
    os.umask(0o777)
    if item["does"] == "removed":
        with tempfile.TemporaryDirectory() as path:
            os.chmod(path, 0o700)
            os.chdir(path)
    else:
        os.chdir("/")
    if item["does"] == "raises" and not os.path.exists(item["trace"]):
        open(item["trace"], "w").close()
        raise ValueError
    return found


class Settled:
    def load(self, group):
        os.makedirs("settled", exist_ok=True)
        os.chdir("settled")

    def run(self, context, items):
        os.umask(0o027)
        for item in items:
            yield moving(item)
"""


@pytest.mark.parametrize("workload", ["moving", "Settled"])
def test_an_item_changes_the_directory_and_the_umask_and_the_next_one_finds_the_same(
    hpctk: Hpctk, workload: str
) -> None:
    Path("world_moving.py").write_text(MOVING)
    kinds = [{"does": does} for does in ("", "removed", "raises", "native")]
    hpctk.worked(kinds * 3, f"world_moving:{workload}", items_per_claim=12)

    rows = rows_by_id(Run.open("run")).values()
    expected = [hpctk.cwd.name, 0o022] if workload == "moving" else ["settled", 0o027]
    assert [list(row["value"].values()) for row in rows] == [expected] * 12


SCRIPT = """
import json
import os
import sys

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../inner"))

from hpc_toolkit import Executor


def around(number):
    return {
        "argv": sys.argv,
        "first": sys.path[0],
        "cwd": os.path.basename(os.getcwd()),
        "main": list(filter(None, [getattr(sys.modules["__main__"], "__file__", None)])),
        "torchrun": {name: os.environ[name] for name in sys.argv[3:] if name in os.environ},
    }


if __name__ == "__main__":
    with Executor("../runs/x", workers=int(sys.argv[1])) as executor:
        print(json.dumps(list(executor.map(around, range(int(sys.argv[2]))))))
"""
OF_A_RANK = [
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
]


@pytest.mark.parametrize("local", [True, False])
def test_a_call_finds_the_arguments_and_the_path_of_its_script_and_no_rank(
    hpctk: Hpctk, *, local: bool
) -> None:
    Path("scripts").mkdir()
    Path("inner").mkdir()
    Path("scripts/script.py").write_text(SCRIPT)
    outer = hpctk.environment(dict.fromkeys(OF_A_RANK, "7"))
    words = ["scripts/script.py", str(int(local)), "3", *OF_A_RANK]

    with subprocess.Popen(
        [sys.executable, *words], env=outer, stdout=subprocess.PIPE, text=True
    ) as script:
        if not local:
            while not Path("runs/x").exists():
                assert script.poll() is None
            assert hpctk("work", "runs/x").code == 0
        out, _ = script.communicate()

    calls = [row["value"] for row in Run.open("runs/x").results()]
    assert script.returncode == 0, out
    for found in calls:
        assert found["argv"] == words
        assert found["first"] == str(hpctk.cwd / "scripts")
        assert found["main"] == [str(hpctk.cwd / "scripts/script.py")]
        assert found["cwd"] == ("inner" if local else hpctk.cwd.name)  # of the worker
        # With LOCAL_RANK, accelerate and others would wait for the other ranks of a training.
        assert found["torchrun"] == {}


@pytest.fixture
def shadows(hpctk: Hpctk) -> Path:
    """The current directory, with a file that cannot be imported for each module of Python."""
    # Python itself imports some for -m, before a line of ours runs; -P keeps it from that.
    early = "import runpy, sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", early], capture_output=True, text=True, check=True)
    for name in sys.stdlib_module_names - {"__future__", *ran.stdout.split()}:
        Path(f"{name}.py").write_text("raise RuntimeError(__name__)\n")
    return hpctk.cwd


NOOP = "hpc_toolkit.science.workloads.synthetic:Noop"
THREADED = """
import threading
from hpc_toolkit.run import Run
end = threading.Event()
threading.Thread(target=end.wait).start()
try:
    code = Run.open("run").work(2)
finally:
    end.set()
raise SystemExit(code)
"""
CALLS = """
from statistics import fmean
from hpc_toolkit import Executor
if __name__ == "__main__":
    with Executor("run", workers=1) as executor:
        assert list(executor.map(fmean, [[1, 2], [3, 5]])) == [1.5, 4.0]
"""


@pytest.mark.usefixtures("shadows")
def test_files_with_the_names_of_pythons_modules_break_no_command_and_no_worker(
    hpctk: Hpctk,
) -> None:
    for words in (
        ("init", "run", "--count", 4, "--workload", NOOP),
        ("work", "run", "--workers", 2),
        ("gather", "run", "-o", "-"),
        ("render", "work-queue", "--run", "run", "--cluster", "generic", "-o", "-"),
    ):
        ended = hpctk(*words)
        assert (ended.code, "RuntimeError" in ended.err) == (0, False), ended.err


@pytest.mark.usefixtures("shadows")
@pytest.mark.parametrize("text", [THREADED, CALLS], ids=["threaded", "executor"])
def test_files_with_the_names_of_pythons_modules_break_no_pool(hpctk: Hpctk, text: str) -> None:
    Path("inner").mkdir()
    Path("inner/script.py").write_text(text)
    if text is THREADED:
        Run.create("run", [{"n": 1}, {"n": 2}], workload=NOOP)

    ended = hpctk.python("inner/script.py")

    assert ended.code == 0, ended.err
    assert len(journal_lines(Run.open("run"), "done")) == 2


SPAWNING = """
import multiprocessing


def f(item):
    child = multiprocessing.get_context("spawn").Process(target=abs, args=(1,))
    child.start()
    child.join()
    return {"code": child.exitcode}
"""


def test_a_process_that_an_item_spawns_does_not_import_our_command_line(hpctk: Hpctk) -> None:
    Path("world_spawning.py").write_text(SPAWNING)
    Path("json.py").write_text("raise RuntimeError\n")
    hpctk.worked([{}], "world_spawning:f")

    assert rows_by_id(Run.open("run"))[0]["value"] == {"code": 0}


@pytest.mark.torch
@pytest.mark.usefixtures("shadows")
def test_files_with_the_names_of_pythons_modules_break_no_launch(hpctk: Hpctk) -> None:
    Path("inner").mkdir()
    Path("inner/train.py").write_text("import os\nprint(os.environ['RANK'])\n")

    ended = hpctk("launch", "--nproc-per-node", 2, "inner/train.py")

    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[rank 0] 0", "[rank 1] 1"]


EDITED = """
import os


def f(item):
    import helper_of_edited
    if item["id"] == 1 and not os.path.exists(item["trace"]):
        open(item["trace"], "w").close()
        with open("helper_of_edited.py", "a") as file:
            file.write("# edited")
        os._exit(1)
    return {}
"""


@pytest.mark.parametrize("strict", [False, True])
def test_a_replaced_executor_finds_edited_code_and_names_it_or_does_not_run_it(
    hpctk: Hpctk, *, strict: bool
) -> None:
    Path("edited.py").write_text(EDITED)
    Path("helper_of_edited.py").write_text("")
    hpctk.make([{}] * 4, "edited:f", items_per_claim=1)

    ended = hpctk("work", "run", *(["--strict-code"] if strict else []))

    said = "the code of stage 'items', edited:f, changed since init: helper_of_edited.py"
    assert ended.err.count(said) == 1, ended.err
    assert ended.code == (1 if strict else 0)
    done = len(journal_lines(Run.open("run"), "done"))
    assert (done < 4) if strict else (done == 4)


def test_workers_use_the_copies_of_code_in_the_run(hpctk: Hpctk) -> None:
    code = Path("copied.py")
    code.write_text("def f(item):\n    return {'file': __file__}\n")
    made = hpctk("init", "run", "--count", 3, "--workload", "copied:f", "--copy-code", umask=0)
    assert made.err.startswith("copied to run/code: copied.py\n")
    code.write_text("raise RuntimeError\n")

    ended = hpctk("work", "run", "--workers", 2, "--strict-code")

    assert ended.code == 0, ended.err
    copy = hpctk.cwd / "run/code/items/copied.py"
    assert {row["value"]["file"] for row in Run.open("run").results()} == {str(copy)}
    assert not any(one.stat().st_mode & 0o002 for one in (copy, *copy.parents[:2]))
    assert hpctk("try", "run").json == {"file": str(copy)}
    assert hpctk("doctor", "run").code == 0


def test_a_module_that_changes_the_directory_when_imported_moves_no_run(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    (tmp_path / "moving.py").write_text("import os\nos.chdir('/')\ndef f(index): return index\n")

    assert hpctk("init", "run", "--count", 1, "--workload", "moving:f").code == 0
    assert (tmp_path / "run" / "run.json").exists()
