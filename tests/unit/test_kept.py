"""Kept jobs: one process at a time submits them, up to what the site takes and the run needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_toolkit.slurm import client
from hpc_toolkit.submit import Kept, keeping
from hpc_toolkit.system.ranks import boot_id, host_name, process_ticks
from tests.fakeslurm import Programs, pending_line
from tests.toyrun import ToyRun
from tests.unit import jobcommands

pytestmark = pytest.mark.usefixtures("elsewhere")

# Counts its jobs from 101, and lets squeue list them, except those whose number is in "gone".
SBATCH = """\
echo "$*" >> "$0.calls"
n=$(( $(cat "$0.count" 2>/dev/null || echo 100) + 1 ))
{before}
echo $n > "$0.count"; echo "$n"
"""


@pytest.fixture
def programs(programs: Programs) -> Programs:
    programs.add("sbatch", SBATCH.format(before=""))
    programs.answer("squeue", "")
    programs.answer("scancel", "")
    return programs


@pytest.fixture
def run(elsewhere: Path) -> ToyRun:
    return ToyRun(Path("a"), 8, unit=1)


def queue(programs: Programs, *jobs: str) -> None:
    """Let squeue list these jobs."""
    programs.answer("squeue", "\n".join(pending_line(one) for one in jobs))


def keep(jobs: int, *words: str) -> tuple[list[str], str]:
    result = jobcommands.call("keep", "a", "--jobs", jobs, "--once", *words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stdout.split(), result.stderr


def state(run: ToyRun) -> dict[str, object]:
    return Kept(run.paths.jobs / "keep-work-queue.json").read()


@pytest.mark.parametrize(
    ("host", "lives", "silent_s", "sends"),
    [
        (host_name(), True, 9999.0, False),
        (host_name(), False, 0.0, True),
        ("elsewhere", False, 60.0, False),
        ("elsewhere", True, 601.0, True),
    ],
)
def test_the_turn_of_a_process_that_is_lost_ends(
    programs: Programs, run: ToyRun, host: str, lives: bool, silent_s: float, sends: bool
) -> None:
    keep(1)
    with subprocess.Popen(["cat"], stdin=subprocess.DEVNULL) as ended:
        ended.wait()
    pid = os.getpid() if lives else ended.pid
    path = run.paths.jobs / "keep-work-queue.2"
    path.symlink_to(f"{host}:{boot_id()}:{pid}:{process_ticks(pid) or 1}:00")
    at = path.lstat().st_mtime - silent_s
    os.utime(path, (at, at), follow_symlinks=False)

    jobs, _ = keep(1)

    assert jobs == ["102"] * sends
    assert state(run)["turn"] == (3 if sends else 1)


def test_jobs_of_the_last_turn_count_even_if_the_listing_lacks_them(
    programs: Programs, run: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(2)
    queue(programs, "101", "102")
    monkeypatch.setattr(keeping, "known_jobs", lambda _: [])

    assert keep(2)[0] == []
    assert keep(3)[0] == ["103"]


FULL = """\
[ $n -le 102 ] || { echo "sbatch: error: AssocMaxSubmitJobLimit" >&2
echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy" >&2; exit 1; }
"""


def test_a_limit_of_the_site_ends_nothing_and_is_not_tried_each_time(
    programs: Programs, run: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add("sbatch", SBATCH.format(before=FULL))
    assert keep(4)[0] == ["101", "102"]

    queue(programs, "101", "102")
    for _ in range(4):
        assert keep(4)[0] == []
    assert len(programs.calls("sbatch")) == 3
    assert "AssocMaxSubmitJobLimit" in str(state(run)["refused"])
    shown = jobcommands.call("status", "a").stdout
    assert "  keep " in shown
    assert "refused the last one: as many jobs are in the queue as a limit allows (Assoc" in shown

    with monkeypatch.context() as later:
        later.setattr(keeping, "_REFUSED_S", 0.0)
        for _ in range(3):
            assert keep(4)[0] == []
    assert len(programs.calls("sbatch")) == 6

    queue(programs, "102")
    programs.add("sbatch", SBATCH.format(before=""))
    assert keep(4)[0] == ["103", "104", "105"]
    assert (state(run)["ended"], state(run)["refused"]) == ("", "")


def test_a_limit_that_other_runs_reach_ends_nothing_and_refuses_a_first_submission(
    programs: Programs, run: ToyRun
) -> None:
    said = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Job violates"
    programs.answer("sbatch", "", code=1, stderr=said)
    words = ("submit", "--run", "a", "--python", sys.executable, "--time", "60", "--keep", 2)

    error = jobcommands.refused(*words)

    full = "as many jobs are in the queue as a limit allows (QOSMaxSubmitJobPerUserLimit)"
    assert error.message == f"no jobs are sent: {full}"
    assert error.hint == "submit again when one of them has left"
    assert state(run)["refused"] == full
    for _ in range(4):
        assert keep(2)[0] == []
    assert (state(run)["ended"], state(run)["failed"]) == ("", 0)


def test_a_silent_slurm_is_not_a_failed_submission(
    programs: Programs, run: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PATIENCE_S", 0.5)
    monkeypatch.setattr(client, "pauses", lambda: iter([0.01] * 99))
    programs.answer("sbatch", "", code=1, stderr="sbatch: error: Socket timed out on send/recv")

    for _ in range(4):
        assert "no jobs are sent now: sbatch: " in keep(1)[1]
    assert (state(run)["failed"], state(run)["ended"]) == (0, "")

    monkeypatch.setattr(client, "PATIENCE_S", 60.0)  # a busy machine starts it late
    programs.add("sbatch", SBATCH.format(before=""))
    assert keep(1)[0] == ["101"]


def test_jobs_that_wait_when_the_run_is_complete_are_cancelled(
    programs: Programs, run: ToyRun
) -> None:
    keep(2)
    running = pending_line("101", State="RUNNING", NodeList="n1")
    programs.answer("squeue", f"{running}\n{pending_line('102')}")
    worker = run.worker("w1")
    for item in range(8):
        worker.work(run.unit_name(item), 1, **{f"i{item}": "done"})
    worker.finish()

    assert "no more jobs are sent: the run is complete" in keep(2)[1]
    assert programs.calls("scancel") == ["102"]
    assert keep(2)[0] == []


def test_a_request_of_later_starts_over_and_keeps_the_turns(
    programs: Programs, run: ToyRun
) -> None:
    keep(1)
    queue(programs, "101")
    jobcommands.call("cancel", "a", "--yes")
    queue(programs)
    assert "no more jobs are sent: 'hpctk cancel' ended it" in keep(1)[1]

    assert keep(1, "--again")[0] == ["102"]

    assert state(run)["turn"] == 2
    record = json.loads((run.paths.jobs / "keep-work-queue.json").read_text())
    assert record["ended"] == ""
