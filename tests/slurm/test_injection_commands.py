"""Hostile texts as names of runs, labs and jobs, of executors, and on the terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.cli import load_commands
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab.settings import LabPaths, LabSettings, check_name
from hpc_toolkit.run import Run
from hpc_toolkit.system.terminal import show_error
from hpc_toolkit.workerjobs import request, submit
from tests.hostile import HOSTILE, ODD_BUT_FINE
from tests.slurm import injection
from tests.slurm.injection import ODD_PLACE, TEXTS, can_be_a_name
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import MEASURED

SLEEP = "hpc_toolkit.science.workloads.synthetic:Sleep"
CLEAR = "\x1b[2J\x1b]0;evil\x07\x9b2J\u202e\r"
"""Clears a terminal, names its window, and turns what follows around."""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    def assert_tame(self) -> None:
        """Nothing of it does more to a terminal than to be read."""
        for line in (self.out + self.err).split("\n"):
            assert line.isprintable(), repr(line)


Call = Any


_command_line: Callable[[str], Any] = cache(load_commands)
"""Each call without the cache would add its commands to the others once more."""


@pytest.fixture
def call(
    lab: LabUnderTest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Ended]:
    """The command line in this process, in an empty directory, beside the lab."""
    for name in set(os.environ) - set(lab.env):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(lab.slurm_conf))
    monkeypatch.chdir(tmp_path)

    def hpctk(*words: str) -> Ended:
        code: object = 0
        try:
            _command_line(words[0])(list(words))
        except SystemExit as end:
            code = end.code
        except HpcToolkitError as error:
            show_error(error)
            code = error.exit_code
        told = capsys.readouterr()
        return Ended(code if isinstance(code, int) else 0, told.out, told.err)

    return hpctk


def sleeping(path: str | Path) -> Run:
    return Run.create(path, [{"seconds": 0.0}], workload=SLEEP)


def queue(lab: LabUnderTest) -> list[str]:
    return lab.run("squeue", "--noheader", "--format=%i %T").stdout.splitlines()


# --- runs ---

sized = pytest.mark.parametrize(
    "every", [pytest.param(24, id="small"), pytest.param(1, id="full", marks=pytest.mark.soak)]
)
SMALL = ("--cluster=lab", "--mem=1G", "--time=5", "--cpus-per-task=1")


@pytest.mark.slow
@sized
def test_a_dry_run_of_a_hostile_run_shows_or_refuses_it_and_does_nothing(
    call: Call, lab: LabUnderTest, tmp_path: Path, every: int
) -> None:
    before, shown, refused = queue(lab), 0, 0
    names = [text for text in TEXTS if "\0" not in text and "\ud800" not in text]
    for text in list(filter(can_be_a_name, names))[::every]:
        run = sleeping(tmp_path / text)

        ended = call("submit", *SMALL, f"--run=./{text}", "--dry-run")

        ended.assert_tame()
        if text.isprintable():
            assert (ended.code, ended.out[:11]) == (0, "#!/bin/bash"), ended
            assert "would run: sbatch --parsable " in ended.err
            shown += 1
        else:
            assert (ended.code, ended.out) == (1, ""), ended
            refused += 1
        assert not run.paths.jobs.exists()
        run.root.rename(tmp_path / "run")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        (tmp_path / "run").rename(tmp_path.parent / f"{tmp_path.name}-{shown + refused}")
    MEASURED.append(f"hostile commands: {shown} shown, {refused} refused")
    assert shown >= 90 // every
    assert refused > 10 // every
    assert queue(lab) == before


def test_a_directory_of_several_lines_is_worked_in_as_any_other(
    call: Call, lab: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cwd = tmp_path / f"a\ntouch canary\n#SBATCH --hold{CLEAR}"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    run = sleeping("r")

    job = call("submit", *SMALL, "--run=r").out.strip()

    assert lab.wait_for(job).state == "COMPLETED"
    assert run.status().complete
    assert {path.name for path in cwd.iterdir()} == {"r", "slurm"}
    assert [path.name for path in cwd.glob("slurm/logs/*")] == [f"work-queue-{job}.out"]
    listed = call("logs", "r", f"--job={job}")
    assert f"work-queue[{job}.0] items left: 0 (complete)" in listed.out
    Ended(0, "", listed.err).assert_tame()
    assert not list(tmp_path.rglob("canary"))


def test_hostile_ids_of_jobs_are_refused_and_cancel_nothing(
    call: Call, lab: LabUnderTest, tmp_path: Path
) -> None:
    sleeping("r")
    job = call("submit", *SMALL, "--run=r", "--sbatch=hold").out.strip()
    other = lab.sbatch("--hold", "--output=/dev/null", "--wrap=true", cwd=tmp_path)
    hostile = (*HOSTILE, *ODD_BUT_FINE, f"{job},{other}", f"{job} {other}", f"{job}_../x", other)
    files = set(tmp_path.rglob("*"))

    for text in hostile:
        for words in (("cancel", "r", "--yes"), ("logs", "r")):
            ended = call(*words, f"--job={text}")
            assert (ended.code, ended.out) == (1, ""), (words, text, ended)
            assert ended.err.startswith("error: ")
            ended.assert_tame()

    assert {line.split()[0] for line in queue(lab)} == {job, other}
    assert set(tmp_path.rglob("*")) == files
    MEASURED.append(f"hostile ids of jobs: {len(hostile)} refused twice")


def test_a_job_with_a_hostile_name_is_shown_in_one_line(
    call: Call, lab: LabUnderTest, tmp_path: Path
) -> None:
    sleeping("r")
    names = ("a|b c", "x JobState=COMPLETED", "$(touch canary)", f"a{CLEAR}b", "a\n999 b")
    for number, name in enumerate(names):
        script = tmp_path / f"own{number}.sbatch"
        script.write_text("#!/bin/bash\n#SBATCH --hold --mem=10M --output=/dev/null\ntrue\n")
        job = call("submit", f"./{script.name}", "--run=r").out.strip()
        lab.scontrol("update", f"jobid={job}", f"jobname={name}")

        state = call("status", "r")
        state.assert_tame()
        # A job that has another name now may be another job.
        which = f"jobs {number + 1}" if number else f"job {job}"
        told = " ".join(state.out.split())
        assert f"{which} unknown (another job has this id, or it was renamed)" in told
    ended = call("cancel", "r", "--yes")
    ended.assert_tame()
    assert not list(tmp_path.glob("canary"))


# --- the terminal ---


@pytest.fixture
def failed(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run whose items, errors, values and name hold what a terminal obeys."""
    text = repr(CLEAR)
    (tmp_path / "wild.py").write_text(
        "from hpc_toolkit.errors import PermanentError\n"
        "def work(item):\n"
        "    if item['n'] == 0:\n"
        f"        return {{'v': {text}}}\n"
        f"    raise PermanentError('bad ' + {text} + '\\nsecond ' + {text})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = f"run{CLEAR}"
    items = [{"n": n, "name": CLEAR, CLEAR: n} for n in range(2)]
    run = Run.create(name, items, workload="wild:work", group_by="name")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_toolkit", "work", name, "--workers=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.status().complete, done.stderr
    Ended(0, done.stdout, done.stderr).assert_tame()
    return name


def test_nothing_that_a_terminal_obeys_reaches_it(call: Call, failed: str) -> None:
    calls = (
        ("status", "RUN"),
        ("status", "RUN", "--json"),
        ("status", "nothing{}"),
        ("explain", "RUN", "--item=0"),
        ("explain", "RUN", "--item=1"),
        ("explain", "RUN", "--item=1", "--json"),
        ("explain", "RUN", "--item=x{}"),
        ("logs", "RUN"),
        ("logs", "RUN", "--item=1"),
        ("logs", "RUN", "--worker=x{}"),
        ("logs", "RUN", "--job=x{}"),
        ("logs", "nothing{}"),
        ("gather", "RUN"),
        ("gather", "RUN", "-o", "{}.nope"),
        ("gather", "RUN", "-o", "{}/x.csv"),
        ("cancel", "RUN", "--job=x{}"),
        ("cancel", "nothing{}"),
        ("submit", "nothing{}/x.sbatch"),
        ("submit", "--run=nothing{}"),
        ("submit", "--run=RUN", "--dry-run"),
        ("retry", "RUN", "--match=x{}"),
        ("render", "x{}"),
        ("render", "--from=x{}"),
        ("render", "--nodes=x{}"),
        ("render", "--evil{}"),
        ("cluster", "show", "x{}"),
        ("lab", "up", "--name=x{}"),
        ("lab", "up", "--dir=x{}"),
        ("status", "RUN", "too many{}"),
    )
    for words in calls:
        texts = [failed if word == "RUN" else word.replace("{}", CLEAR) for word in words]
        ended = call(*(word.replace("=RUN", f"={failed}") for word in texts))

        assert ended.code in (0, 1, 2), words
        if ended.code == 2:
            # The words of the command line library; what it leaves changes the direction at most.
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", ended.err), words
        else:
            ended.assert_tame()


# --- labs ---


def test_hostile_names_and_directories_of_labs_are_refused_or_taken(
    lab_directory: Path,
) -> None:
    taken = {"name": 0, "directory": 0}
    for text in (*HOSTILE, *ODD_BUT_FINE):
        checks: dict[str, Callable[[], object]] = {
            "name": partial(check_name, text),
            "directory": partial(LabPaths, Path(f"/tmp/{text}")),
        }
        for what, check in checks.items():
            try:
                check()
            except HpcToolkitError:
                continue
            taken[what] += 1
    MEASURED.append(f"hostile labs taken: {taken} of {len(HOSTILE) + len(ODD_BUT_FINE)}")
    assert 0 < taken["directory"] < 30
    assert taken["name"] < 5

    settings = LabSettings(nodes=1, gpus_per_node=0)
    with LabUnderTest(lab_directory / "-a@b+c_.d", settings) as odd:
        job = odd.sbatch("--output=/dev/null", "--wrap=hostname", cwd=lab_directory)
        assert odd.wait_for(job).state == "COMPLETED"


# --- jobs of an executor ---


@pytest.mark.slow
def test_workers_of_a_hostile_run_finish_it(
    call: Call, lab: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ODD_PLACE
    place.mkdir()
    names = (ODD_PLACE, "--evil {count_left} {0} %j \\ `touch canary`")
    runs = [sleeping(place / name) for name in names]

    monkeypatch.chdir(place)
    started = [
        submit(run, request(run, 1, injection.LAB, {"mem": "200M", "time": 5})) for run in runs
    ]
    with pytest.raises(HpcToolkitError, match="--run"):
        request(sleeping(tmp_path / "a\ntouch canary\n"), 1, injection.LAB, {})

    for run, workers in zip(runs, started, strict=True):
        for job in workers:
            assert lab.wait_for(job.job).state == "COMPLETED"
        assert run.status().complete
    assert {path.name for path in place.iterdir()} == {*names, "slurm"}
    assert not list(tmp_path.rglob("canary"))
