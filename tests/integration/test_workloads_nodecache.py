"""The node's cache of checkpoints under processes that begin together and are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

SIZE = 200_000
WHOLE = SIZE + 2  # with the configuration

READER = """
import hashlib, os, sys
from pathlib import Path
from hpc_toolkit.rundir import files
from hpc_toolkit.science.workloads.checkpointfiles import local_copy

source, seen = sys.argv[1:3]
files.is_local = lambda path: not str(path).startswith(source)
seen = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(event, arguments):
    if event == "open" and str(arguments[0]).startswith(source):
        os.write(seen, os.path.basename(str(arguments[0])).encode() + b"\\n")

print("ready", flush=True)
sys.stdin.readline()
sys.addaudithook(note)
with local_copy(Path(source)) as copy:
    print(copy, hashlib.sha256((copy / "model.safetensors").read_bytes()).hexdigest(), flush=True)
"""

HALF = """
import sys, time
from pathlib import Path
from hpc_toolkit.rundir import files
from hpc_toolkit.science.workloads.checkpointfiles import local_copy

source = sys.argv[1]
files.is_local = lambda path: not str(path).startswith(source)

def write_half(path, chunks):
    path.write_bytes(b"".join(chunks)[:-1])
    print("half", flush=True)
    time.sleep(600)

files.write_new = write_half
with local_copy(Path(source)):
    pass
"""

STORM = """
import random, sys, time
from pathlib import Path
from hpc_toolkit.rundir import files
from hpc_toolkit.science.workloads.checkpointfiles import local_copy

root, seed, seconds, slow = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
files.is_local = lambda path: "/step" not in str(path)
real, draw = files.write_new, random.Random(seed)

def slowly(chunks):
    for chunk in chunks:
        for start in range(0, len(chunk), 50_000):
            time.sleep(0.002)
            yield chunk[start : start + 50_000]

if slow == "slow":
    files.write_new = lambda path, chunks: real(path, slowly(chunks))
sources = sorted(root.glob("step*"))
copies = 0
end = time.monotonic() + seconds
while time.monotonic() < end:
    source = draw.choice(sources)
    with local_copy(source) as copy:
        copies += copy != source
        for _ in range(2):
            rows = (copy / "model.safetensors").read_bytes()
            assert rows == (int(source.name[4:]) % 256).to_bytes() * 200_000, copy
            time.sleep(draw.random() * 0.003)
print(copies)
"""


@pytest.fixture
def node(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the copies are."""
    monkeypatch.setenv("HPCTK_NODE_CACHE", str(fast_dir / "node"))
    return fast_dir / "node" / "hpctk-checkpoints-1"


def checkpoint(directory: Path, byte: int = 7) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes([byte]) * SIZE)
    return directory


def started(stack: ExitStack, script: str, *arguments: object) -> subprocess.Popen[str]:
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.kill)
    return process


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def said_to_all(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def test_eight_processes_of_a_node_read_a_checkpoint_from_the_share_once(
    node: Path, fast_dir: Path
) -> None:
    source = checkpoint(fast_dir / "step1")
    with ExitStack() as stack:
        readers = [started(stack, READER, source, fast_dir / "seen") for _ in range(8)]
        assert {told(reader) for reader in readers} == {"ready"}
        said_to_all(readers)
        found = {told(reader) for reader in readers}
        assert {reader.wait() for reader in readers} == {0}

    assert len(found) == 1
    assert found.pop().startswith(str(node))
    opened = (fast_dir / "seen").read_text().split()
    assert sorted(opened) == ["config.json", "model.safetensors"]


def test_copy_whose_maker_was_killed_is_made_by_the_next(node: Path, fast_dir: Path) -> None:
    source = checkpoint(fast_dir / "step1")
    with ExitStack() as stack:
        maker = started(stack, HALF, source)
        assert told(maker) == "half"
        reader = started(stack, READER, source, fast_dir / "seen")
        assert told(reader) == "ready"
        said_to_all([reader])
        maker.kill()
        copy, _ = told(reader).split()
        assert reader.wait() == 0

    assert Path(copy).parent == node
    assert (Path(copy) / "model.safetensors").read_bytes() == bytes([7]) * SIZE
    assert [path.name for path in node.iterdir() if path.is_dir()] == [Path(copy).name]


@pytest.mark.soak
def test_many_who_read_and_are_killed_keep_the_limit_and_every_byte(
    node: Path, fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 3 * WHOLE + SIZE // 2
    monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", f"{limit}B")
    for number in range(5):
        checkpoint(fast_dir / f"step{number}", number)
    seconds, draw, killed, most = 20.0, random.Random(3), 0, 0
    with ExitStack() as stack:
        readers = [started(stack, STORM, fast_dir, n, seconds, "fast") for n in range(6)]
        victim, dies, end = None, 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            if victim is None:
                victim = started(stack, STORM, fast_dir, killed, 600, "slow")
                dies = time.monotonic() + 0.2 + 0.3 * draw.random()
            elif time.monotonic() > dies:
                victim.send_signal(signal.SIGKILL)
                victim, killed = None, killed + 1
            most = max(most, weights_in(node))
            time.sleep(0.001)
        assert all(int(told(reader)) > 0 for reader in readers)
        assert {reader.wait() for reader in readers} == {0}

    assert killed > 10
    assert most <= limit
    assert len({path.name.lstrip(".") for path in node.iterdir() if path.is_dir()}) <= 3


def weights_in(directory: Path) -> int:
    total = 0
    for top, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(top, name)).st_size
            except FileNotFoundError:
                continue
    return total
