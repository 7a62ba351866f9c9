"""What a job used of what it had: samples of a monitor, and Slurm's accounting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_toolkit.results.sums import HostLoad, efficiency, read_loads
from hpc_toolkit.system.record import asdict
from hpc_toolkit.training import monitor
from hpc_toolkit.training.monitor import Sampler, record
from tests.toyrun import ToyRun

# Two nodes, two tasks each, two CPUs per task. Step 0 ran on both, step 1 beside it on the first;
# step 2 followed with two tasks of 300 MiB on one node.
SEVERAL = """\
31|2026-11-28T19:25:08|2026-11-28T19:25:32|24|8|2||00:05.838|||billing=8,cpu=8,mem=4G,node=2
31.batch|2026-11-28T19:25:08|2026-11-28T19:25:32|24|4|1|1|00:00.054|00:00:00|21416K|cpu=4,mem=2G
31.0|2026-11-28T19:25:08|2026-11-28T19:25:22|14|8|2|4|00:05.116|00:00:01|111000K|cpu=8,mem=4G
31.1|2026-11-28T19:25:08|2026-11-28T19:25:21|13|4|1|1|00:00.077|00:00:00|59712K|cpu=4,mem=2G
31.2|2026-11-28T19:25:22|2026-11-28T19:25:32|10|4|1|2|00:00.590|00:00:00|315796K|cpu=4,mem=2G
"""
ONE = """\
32|2026-11-28T19:25:08|2026-11-28T19:25:19|11|1|1||00:01.894|||billing=1,cpu=1,mem=500M,node=1
32.batch|2026-11-28T19:25:08|2026-11-28T19:25:19|11|1|1|1|00:00.017|00:00:00|10656K|cpu=1,mem=500M
32.0|2026-11-28T19:25:08|2026-11-28T19:25:19|11|1|1|1|00:01.876|00:00:01|213324K|cpu=1,mem=500M
"""
RUNNING = """\
33|2026-11-28T19:25:08|Unknown|11|1|1||00:00:00|||billing=1,cpu=1,mem=500M,node=1
33.0|2026-11-28T19:25:08|Unknown|11|1|1|1|00:00:00|||cpu=1,mem=500M
"""
K = 1 << 10
USED_31 = 0.054 + 5.116 + 0.077 + 0.590
USED_32 = 0.017 + 1.876
OF_31 = ((21416 + 2 * 315796) * K, 2 << 30, 1, 768)
OF_32 = ((10656 + 213324) * K, 500 << 20, None, 320)


@pytest.mark.parametrize(
    ("text", "cpu", "others"),  # the last ones: memory, of_memory, cpus_per_task, mem_mib
    [
        # The peak is that of the batch step and two tasks of step 2, not the sum of all steps.
        (SEVERAL, USED_31 / (24 * 8), OF_31),
        (ONE, USED_32 / 11, OF_32),
        # Of two jobs the larger one counts for memory, and both for the CPUs.
        (ONE + SEVERAL, (USED_31 + USED_32) / (24 * 8 + 11), OF_31),
        # A requeued job: both of its runs, each followed by its steps.
        (ONE + ONE, USED_32 / 11, OF_32),
        # Tasks that were killed have no TotalCPU, but a sampled AveCPU: 4 tasks of 12 s.
        (
            SEVERAL.replace("00:05.116|00:00:01", "00:00:00|00:00:12"),
            *((48 + USED_31 - 5.116) / (24 * 8), OF_31),
        ),
        # More CPU time than was allocated (clocks), and hours and days.
        (ONE.replace("00:01.876", "1-02:03:04"), 1.0, OF_32),
        # No memory was sampled, and none is known to be allocated.
        (
            ONE.replace("10656K", "").replace("213324K", "").replace("mem=500M,", ""),
            *(USED_32 / 11, (None, None, None, None)),
        ),
        (RUNNING + ONE, USED_32 / 11, OF_32),
    ],
)
def test_steps_and_nodes_are_counted_once(text: str, cpu: float, others: tuple[Any, ...]) -> None:
    found = efficiency(text, {})

    assert found is not None
    assert found.cpu == pytest.approx(cpu)
    assert (found.memory, found.of_memory, found.cpus_per_task, found.mem_mib) == others


def test_no_answer_and_no_samples_say_nothing_and_a_text_that_is_cut_is_no_failure() -> None:
    job, _, _ = ONE.partition("\n")
    for text in ("", RUNNING, "garbage\n", "a|b|c\n", ONE.replace("|", ""), f"{job}\n"):
        assert efficiency(text, {}) is None
    for cut in range(len(SEVERAL)):
        found = efficiency(SEVERAL[:cut], {})
        assert found is None or (found.cpu is not None and 0 <= found.cpu <= 1)


def test_the_line_says_what_would_have_been_enough() -> None:
    gpus = HostLoad(samples=2, own_cpu=180.0, gpu=120.0, gpu_values=2, rss_most=3 << 30)
    several, monitored = efficiency(SEVERAL, {"n1": gpus}), efficiency("", {"n1": gpus})

    assert several is not None
    assert monitored is not None
    assert several.line() == (
        "3% of the CPUs, 60% of the GPUs, 637.7 MiB of 2.0 GiB memory per node"
        "; enough: --cpus-per-task=1 --mem=768M"
    )
    # Without accounting nothing is known of what the job had.
    assert monitored.line() == "90% of the CPUs, 60% of the GPUs, 3.0 GiB memory per node"
    quiet = efficiency("", {"n1": replace(gpus, gpu_values=0, rss_most=0)})
    assert quiet is not None
    assert quiet.line() == "90% of the CPUs"
    assert asdict(quiet)["gpu"] is None


def test_a_job_is_measured_by_its_own_cpus_of_a_host(toy: ToyRun, tmp_path: Path) -> None:
    run = toy.reopen()
    log = run.paths.monitor_log("n1", 1)
    header = {"type": "header", "host": "n1", "cpus": 4, "cpus_allowed": [1, 3]}
    sample = {"type": "sample", "cpu_percent": 50.0, "each_cpu_percent": [0.0, 90.0, 40.0, 70.0]}
    lines = [header, {**sample, "rss_bytes": 5, "gpus": []}]
    log.parent.mkdir(exist_ok=True)
    log.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")

    found = efficiency("", read_loads(run.paths))

    assert found is not None
    assert (found.cpu, found.memory) == (0.8, 5)


class NotSupportedError(Exception):
    """The library's own."""


def busy(gpu: int) -> Any:
    if gpu == 1:
        raise NotSupportedError
    return SimpleNamespace(gpu=90)


def fake_nvml(shut: list[bool]) -> Any:
    """Stand for pynvml on a host with two GPUs, of which the second tells no load."""
    return SimpleNamespace(
        NVMLError=NotSupportedError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: shut.append(True),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=(handle + 1) << 30),
        nvmlDeviceGetUtilizationRates=busy,
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_sample_tells_cpus_memory_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "INTERVAL_S", 1e-9)  # so short that none is left out
    shut: list[bool] = []
    left = iter((False, False, True))

    record(Sampler(nvml=fake_nvml(shut)), tmp_path / "m.jsonl", lambda _wait_s: next(left))

    header, *samples = lines_of(tmp_path / "m.jsonl")
    assert header["pid"] == os.getpid()
    assert header["cpus_allowed"] == sorted(os.sched_getaffinity(0))
    assert len(samples) == 3
    assert samples[0]["rss_bytes"] > 1 << 20
    assert samples[0]["processes"] >= 1
    assert len(samples[0]["each_cpu_percent"]) == os.cpu_count()
    assert samples[0]["gpus"] == [
        {"busy_percent": 90, "memory_used_bytes": 1 << 30},
        {"busy_percent": None, "memory_used_bytes": 2 << 30},
    ]
    assert shut == [True]


WATCHED = """
import os, sys
from pathlib import Path
from hpc_toolkit.training.monitor import watching

children = Path(f"/proc/self/task/{os.getpid()}/children")
with watching(Path("/no such directory/m.jsonl")):
    print("goes on")
with watching(Path(sys.argv[1])):
    print(os.getpid(), len(os.listdir("/proc/self/task")), len(children.read_text().split()))
print(len(children.read_text().split()))
"""


def test_watching_samples_this_process_from_a_child_without_a_thread(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"

    # In a process of its own: other tests leave native threads, some of which end at a fork.
    words = [sys.executable, "-c", WATCHED, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    went_on, *numbers = done.stdout.splitlines()
    assert went_on == "goes on"
    assert "warning: the monitor stopped: [Errno 2] No such file or directory" in done.stderr
    pid, threads, during, after = map(int, " ".join(numbers).split())
    assert (threads, during, after) == (1, 1, 0)
    header, sample = lines_of(path)
    assert header["pid"] == pid
    assert sample["processes"] >= 1
