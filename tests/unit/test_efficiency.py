"""What jobs used, from lines that sacct of Slurm 22.05 wrote, and from samples of the monitor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.results.sums import HostLoad, efficiency, read_loads
from hpc_toolkit.system.record import asdict
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
