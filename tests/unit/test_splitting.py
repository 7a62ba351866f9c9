"""'hpctk submit --split': what Slurm is asked, and which shape is sent."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path

import pytest

from hpc_toolkit.submit.splitting import _divisors
from tests.fakeslurm import Programs
from tests.toyrun import ToyRun
from tests.unit import jobcommands

pytestmark = pytest.mark.usefixtures("elsewhere")

# With --test-only it answers what is written for these nodes and this time, else it submits.
SBATCH = """\
case "$*" in *--test-only*) ;; *) echo "$*" >> "$0.sent"
  n=$(( $(cat "$0.count" 2>/dev/null || echo 100) + 1 )); echo $n > "$0.count"; echo $n; exit 0;;
esac
for script; do :; done
nodes=; limit=
while read -r line; do case "$line" in
  "#SBATCH --nodes="*) nodes=${line##*=};; "#SBATCH --time="*) limit=${line##*=};;
esac; done < "$script"
echo "$nodes $limit" >> "$0.asked"
answer="$0.$nodes-$limit"; [ -e "$answer" ] || answer="$0.$nodes"
[ -e "$answer" ] || { echo "sbatch: error: allocation failure: no" >&2; exit 1; }
cat "$answer" >&2
"""
ANSWER = (
    "sbatch: lua: welcome\nsbatch: Job 7 to start at {} using 32 processors on nodes n1 in main"
)


@pytest.fixture
def programs(programs: Programs) -> Programs:
    programs.add("sbatch", SBATCH)
    programs.answer("squeue", "")
    return programs


@pytest.fixture(autouse=True)
def run(elsewhere: Path) -> ToyRun:
    return ToyRun(Path("a"), 64, unit=1)


def starts(programs: Programs, **answers: float | str) -> None:
    """Let Slurm start jobs of these nodes, and perhaps limit, in so many seconds."""
    for shape, answer in answers.items():
        at = answer if isinstance(answer, str) else ANSWER.format(round(time.time() + answer))
        name = f"sbatch.{shape[1:].replace('_', '-').replace('h', ':')}"
        (programs.root / name).write_text(at)


def lines(programs: Programs, name: str) -> list[str]:
    path = programs.root / f"sbatch.{name}"
    return path.read_text().splitlines() if path.exists() else []


call = partial(jobcommands.call, "submit", "--run", "a", "--nodes", "4", "--time", "4h", "--split")


@pytest.mark.parametrize(
    ("nodes", "parts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 6]), (7, [1, 7]), (9, [1, 3, 9])]
)
def test_nodes_are_divided_without_a_remainder(nodes: int, parts: list[int]) -> None:
    assert _divisors(nodes) == parts


def test_the_largest_jobs_of_those_that_start_first_are_sent(programs: Programs) -> None:
    starts(programs, n4=7200, n2=590, n1=600)

    result = call()

    assert result.stdout.split() == ["101", "102"]
    assert lines(programs, "asked") == ["4 04:00:00", "2 04:00:00", "1 04:00:00"]
    assert re.search("1 job of 4 nodes for 04:00:00: in 2 h 00 min, 20..-", result.stderr)
    assert "\nchosen: 2 jobs of 2 nodes for 04:00:00\n" in result.stderr
    assert "each of 2 jobs requests 2 nodes" in result.stderr


def test_a_job_that_starts_at_once_is_sent_as_it_was_requested(programs: Programs) -> None:
    starts(programs, n4=1, n2=1, n1=1)

    result = call()

    assert result.stdout.split() == ["101"]
    assert "1 job of 4 nodes for 04:00:00: now" in result.stderr
    assert "chosen: 1 job of 4 nodes for 04:00:00" in result.stderr


def test_a_shorter_limit_is_asked_about_if_all_items_fit_into_it(
    programs: Programs, run: ToyRun
) -> None:
    worker = run.worker("w1")
    for item in range(8):
        worker.claim(run.unit_name(item))
        worker.attempt(item, seconds=60.0)
        worker.release(seconds=60.0)
    worker.finish()
    starts(programs, n4=9000, n2=9000, n1=9000, n1_02h00h00=1)

    result = call()

    assert lines(programs, "asked")[3:] == ["4 02:00:00", "2 02:00:00", "1 02:00:00"]
    assert "chosen: 8 jobs of 1 node for 02:00:00" in result.stderr
    assert len(result.stdout.split()) == 8


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "sbatch: Job 7 to start at N/A using 1 processors on nodes  in partition main",
        "sbatch: Job 7 to start at 99999999999999999 using 1 processors",
        "sbatch: Auftrag 7 beginnt bald",
    ],
)
def test_an_answer_that_names_no_start_sends_the_job_as_it_is(
    programs: Programs, answer: str
) -> None:
    starts(programs, n4=answer, n2=answer)

    result = call()

    assert result.stdout.split() == ["101"]
    assert "4 jobs of 1 node for 04:00:00: no start: sbatch: sbatch: error: alloc" in result.stderr
    assert "Slurm names no start; the job is sent as it was requested" in result.stderr


def test_times_of_other_formats_and_far_ahead_are_read(programs: Programs) -> None:
    far = ANSWER.format(time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3e7)))
    starts(programs, n4=4e7, n2=far, n1=far)

    result = call()

    assert "chosen: 2 jobs of 2 nodes" in result.stderr


def test_shapes_beyond_a_limit_of_the_site_are_not_asked_about(
    programs: Programs, elsewhere: Path
) -> None:
    (elsewhere / "site.toml").write_text('description = "s"\nmax_submit_jobs = 3\n')
    starts(programs, n4=7200, n2=600, n1=1)

    result = call("--cluster", "./site.toml")

    assert "4 jobs of 1 node for 04:00:00: no start: --split: 4 jobs are more than" in result.stderr
    assert "chosen: 2 jobs of 2 nodes" in result.stderr


def test_a_silent_slurm_is_asked_once(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_toolkit.slurm.client.ASK_S", 0.0)
    silent = (
        'case "$*" in *--test-only*) echo >> "$0.asked"; echo "Socket timed out" >&2; exit 1;; esac'
    )
    programs.add("sbatch", f"{silent}\n{SBATCH}")

    result = call()

    assert result.stdout.split() == ["101"]
    assert len(lines(programs, "asked")) == 1
    assert "Slurm names no start" in result.stderr


def test_kept_jobs_are_as_many_more_as_they_are_smaller(programs: Programs) -> None:
    starts(programs, n4=7200, n2=7200, n1=1)

    result = call("--keep", "2")

    assert len(result.stdout.split()) == 8
    assert "up to 8 of work-queue" in jobcommands.call("status", "a").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--jobs", "2"), "--split and --jobs exclude each other"),
        (("--array", "0-3"), "--split and --array exclude each other"),
        (("--dependency", "singleton"), "--split and --dependency exclude each other"),
    ],
)
def test_options_that_split_chooses_are_refused(words: tuple[str, ...], message: str) -> None:
    error = call(*words).exception

    assert message in str(error)
