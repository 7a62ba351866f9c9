"""``hpctk launch`` with real ranks: they train, die, start again, are warned and named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.realrun import Hpctk, Started, lives, wait_until

# A process that imports torch takes 3 s alone, and many times that among others.
pytestmark = [pytest.mark.slow, pytest.mark.torch]

# Says after each step which one it was, of which start, and in which process.
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group(os.environ["HPCTK_BACKEND"])
total = torch.ones(1)
for step in range(int(sys.argv[1])):
    dist.all_reduce(total)
    total /= dist.get_world_size()
    assert total == 1
    print("step", step, "start", os.environ["TORCHELASTIC_RESTART_COUNT"], "pid", os.getpid())
    # Until the test has seen it, this start does not end.
    while step == 2 and not os.path.exists(sys.argv[2]):
        time.sleep(0.02)
dist.destroy_process_group()
"""

# A rank that needs no torch: it says where it is, and does what its arguments say.
PLAIN = """
import os, signal, sys, time

found = []
signal.signal(signal.SIGUSR1, lambda number, frame: found.append(number))
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
print("ready", os.getpid(), *(os.environ[name] for name in names))
rank, start = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
if sys.argv[1] == "fail" and rank == 1:
    raise SystemExit(int(sys.argv[2])) if len(sys.argv) > 2 else ValueError("nothing to learn")
if sys.argv[1] == "again" and start == "1":
    sys.exit()
while not found:
    time.sleep(0.02)
# The second saves after the first has left, as ranks do that write parts of a checkpoint.
time.sleep(0.5 * rank)
print("saved")
sys.exit(75)
"""


# In the place of torch, whose import takes seconds.
STORE = """
class TCPStore:
    def __init__(self, *_, **__):
        pass
"""

# Starts children in its group, in sessions of their own, and behind parents that have ended; one
# ignores SIGTERM.
PARENT = """
import os, signal, subprocess, sys, time
from pathlib import Path

def start(script):
    return subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)

wait = "echo $$; exec sleep 3600"
started = [
    start(wait),
    start(f"exec setsid bash -c '{wait}'"),
    start(f"setsid bash -c '{wait}' & exit"),
    start("setsid bash -c 'trap \"\" TERM; echo $$; while :; do sleep 0.1; done' & exit"),
]
print("children", *(child.stdout.readline().strip() for child in started), flush=True)
printed = Path(__file__).with_name("printed")
if sys.argv[1] == "wait" or (sys.argv[1] == "fail" and os.environ["RANK"] == "0"):
    printed.touch()
    signal.pause()
while sys.argv[1] == "fail" and not printed.exists():  # else the other may be ended before
    time.sleep(0.01)
sys.exit(3 if sys.argv[1] == "fail" else 0)
"""

RECORDED = """
import json, os, sys, time
from pathlib import Path
from torch.distributed.elastic.multiprocessing.errors import record

OURS = ("ROLE", "TORCH", "GROUP", "RANK", "LOCAL_", "WORLD", "MASTER")

@record
def main():
    name = f"{sys.argv[1]}-{os.environ['RANK']}.json"
    found = {key: value for key, value in os.environ.items() if key.startswith(OURS)}
    Path(__file__).with_name(name).write_text(json.dumps(found))
    # Until both have written: a failure ends the other.
    while len(list(Path(__file__).parent.glob(f"{sys.argv[1]}-*.json"))) < 2:
        time.sleep(0.02)
    raise ValueError("nothing to learn")

main()
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Logs of ranks that failed stay, and so do those of an agent that was killed.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "HPCTK_", "PET_", "TORCHELASTIC_", "MASTER_")):
            monkeypatch.delenv(name)


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture
def _without_torch(hpctk: Hpctk, tmp_path: Path) -> None:
    torch = tmp_path / "first" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "distributed.py").write_text(STORE)
    hpctk.python_path = f"{torch.parent}:{hpctk.python_path}"


without_torch = pytest.mark.usefixtures("_without_torch")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    return path


def ready(started: Started, ranks: int, start: int = 0) -> list[list[str]]:
    """Wait until plain ranks of a start are there: what each said of itself."""

    def found() -> list[list[str]]:
        lines = re.findall(r"^\[rank \d+\] ready (.*)$", started.printed(), re.MULTILINE)
        words = [line.split() for line in lines if line.split()[5] == str(start)]
        return words if len(words) == ranks else []

    return wait_until(found, f"{ranks} ranks")


def trained(started: Started, rank: int, step: int, start: int) -> int:
    """Wait until a rank has made a step; its process."""
    pattern = rf"^\[rank {rank}\] step {step} start {start} pid (\d+)$"
    found = wait_until(
        lambda: re.search(pattern, started.printed(), re.MULTILINE), f"step {step} of rank {rank}"
    )
    assert found is not None
    return int(found[1])


@pytest.mark.alone
def test_of_two_launches_at_once_a_killed_rank_starts_again_in_its_own(
    hpctk: Hpctk, train: Path, tmp_path: Path
) -> None:
    options = ("--nproc-per-node", 2, "--max-restarts", 1, "--run-dir", "run", "--backend", "gloo")
    first, second = (
        hpctk.start("launch", *options, train, 5, tmp_path / f"go-{number}") for number in range(2)
    )
    killed = trained(first, 1, 2, 0)
    trained(second, 0, 2, 0)

    os.kill(killed, signal.SIGKILL)
    at = time.monotonic()
    trained(first, 0, 0, 1)
    took_s = time.monotonic() - at
    for number in range(2):
        (tmp_path / f"go-{number}").touch()

    one, other = first.ended(), second.ended()
    assert (one.code, other.code) == (0, 0)
    ending = "note: exit code 0; 2 ranks, {}; next: hpctk status run"
    assert one.err.splitlines()[-1] == ending.format("1 restart")
    assert other.err.splitlines()[-1] == ending.format("0 restarts")
    assert "start 1" not in other.out
    # Half a minute is promised; a rank starts in the time in which it imports torch.
    assert took_s < 30
    print(f"training again {took_s:.1f} s after the kill")
    logs = [path.name for path in sorted((tmp_path / "run" / "logs").glob("*/*.out"))]
    assert logs.count("rank-0.restart-0.out") == 2
    assert logs.count("rank-1.restart-1.out") == 1


@without_torch
def test_a_warning_reaches_every_rank_and_what_left_with_75_does_not_start_again(
    hpctk: Hpctk, plain: Path
) -> None:
    started = hpctk.start("launch", "--nproc-per-node", 2, "--max-restarts", 3, plain, "wait")
    ready(started, 2)

    started.send(signal.SIGUSR1)
    ended = started.ended()

    assert ended.code == 75
    assert ended.out.count("ready") == ended.out.count("saved") == 2
    assert "error:" not in ended.err


@without_torch
def test_the_rank_that_failed_is_named_and_gives_its_code(hpctk: Hpctk, plain: Path) -> None:
    words = ("launch", "--nproc-per-node", 2, plain, "fail")
    without_stdout = hpctk.start(*words, 7, first="import sys; sys.stdout = None")
    command = hpctk(*words)

    assert without_stdout.ended().code == 7
    assert command.code == 1
    error, _, ending = command.err[command.err.index("error:") :].partition("note: ")
    assert re.match(r"error: rank 1 on \S+ ended with exit code 1; its log: (\S+)\n", error)
    assert error.endswith("  ValueError: nothing to learn\n")
    assert ending.startswith("exit code 1; 2 ranks, 0 restarts; with --run-dir DIR")


@without_torch
def test_an_agent_that_is_killed_takes_its_ranks_along(hpctk: Hpctk, plain: Path) -> None:
    started = hpctk.start("launch", "--nproc-per-node", 2, plain, "wait")
    pids = [int(words[0]) for words in ready(started, 2)]

    started.send(signal.SIGKILL)

    assert started.ended().code == -signal.SIGKILL
    wait_until(lambda: not any(lives(pid) for pid in pids), "the ranks to end")


@without_torch
@pytest.mark.parametrize("how", ["fail", "end", "wait"])
def test_children_of_ranks_are_ended_whatever_their_session_and_parent(
    how: str, hpctk: Hpctk, tmp_path: Path
) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    started = hpctk.start("launch", "--nproc-per-node", 2, tmp_path / "parent.py", how)

    def found() -> list[int]:
        words = re.findall(r"^\[rank \d\] children (.*)$", started.printed(), re.MULTILINE)
        return [int(pid) for line in words for pid in line.split()] if len(words) == 2 else []

    children = wait_until(found, "the children")
    if how == "wait":
        started.send(signal.SIGTERM)

    ended = started.ended()
    assert ended.code == {"fail": 3, "end": 0, "wait": 143}[how], ended.err
    assert len(children) == 8
    assert [pid for pid in children if lives(pid)] == []


@pytest.mark.soak  # unit/test_launcher.py has the variables, this compares with torchrun itself
def test_a_rank_finds_the_variables_and_the_error_file_of_torchrun(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    (tmp_path / "recorded.py").write_text(RECORDED)
    words = ("--nproc-per-node", "2", "--max-restarts", "0", "--role", "trainer")
    meeting = ("--nnodes=1:1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")

    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *words,
            *meeting,
            "recorded.py",
            "torchrun",
        ],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    ours = hpctk("launch", *words, *meeting, "-t", "0", tmp_path / "recorded.py", "ours")

    assert ours.code == 1
    for rank in range(2):
        theirs, own = (
            json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            for name in ("torchrun", "ours")
        )
        assert theirs.keys() - own.keys() == {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # hpctk keeps torch's default
            "TORCHELASTIC_SIGNALS_TO_HANDLE",  # is for torchrun itself
        }
        for name in ("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "RANK", "WORLD_SIZE"):
            assert own[name] == theirs[name]
    # Nothing else shows the error, since the ranks' output goes to no file.
    assert "\n  ValueError: nothing to learn\n" in ours.err


def test_nodes_start_again_together_and_meet_in_a_new_place(hpctk: Hpctk, plain: Path) -> None:
    options = ("--nnodes", 2, "--max-restarts", 1, "--run-dir", "run", "--rdzv-id", "first")
    nodes = [
        hpctk.start(
            *("launch", *options, "--node-rank", node, plain, "again"),
            env={"HPCTK_HOST": f"n{node}"},
        )
        for node in range(2)
    ]
    before = [ready(node, 1)[0] for node in nodes]

    # The rank of node 0 notices nothing: it is its agent that is told.
    os.kill(int(before[1][0]), signal.SIGKILL)
    after = [ready(node, 1, start=1)[0] for node in nodes]

    assert [node.ended().code for node in nodes] == [0, 0]
    assert [words[1:3] for words in before] == [["0", "2"], ["1", "2"]]
    for words in (before, after):
        assert words[0][3:5] == words[1][3:5]
    assert before[0][4] != after[0][4]
    assert list((hpctk.cwd / "run" / "rendezvous").iterdir()) == []


def test_tasks_that_srun_started_become_ranks(hpctk: Hpctk, train: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    tasks = [
        hpctk.start(
            *("launch", "--run-dir", "run", "--backend", "gloo", train, 3, tmp_path / "go"),
            env={
                **step,
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task),
                "SLURM_NODEID": "0",
            },
        )
        for task in range(2)
    ]

    for task in tasks:
        ended = task.ended()
        assert ended.code == 0, ended.err
        # The task itself is the rank; no agent is between it and srun.
        assert re.findall(r"step \d start 0 pid (\d+)", ended.out) == [str(task.pid)] * 3
    meeting = hpctk.cwd / "run" / "rendezvous"
    wait_until(lambda: not list(meeting.iterdir()), "the name to be taken away")
