"""Sweeps of Hydra with its published tests of launchers; test_doors_killed.py kills one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk

pytest.importorskip("hydra", reason="needs hydra-core")

from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite

SCRIPT = """
import json
import os
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback


class Notes(Callback):
    def on_job_start(self, config, **_):
        Path(HydraConfig.get().runtime.output_dir, "began").write_text(str(config.lr))

    def on_job_end(self, config, job_return, **_):
        Path(config.hydra.runtime.output_dir, "ended").write_text(job_return.status.name)


class Loss(float):
    pass


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    job = HydraConfig.get()
    with open(cfg.trace, "a", buffering=1) as file:
        file.write(f"{job.job.num} {cfg.lr} {cfg.seed} {os.getpid()}\\n")
    time.sleep(cfg.seconds)
    if cfg.lr in cfg.bad:
        raise ValueError(f"lr {cfg.lr} is bad")
    facts = {"num": job.job.num, "id": job.job.id, "name": job.job.name, "here": os.getcwd()}
    facts |= {"dirname": job.job.override_dirname, "out": job.runtime.output_dir}
    facts |= {one: os.environ.get(one) for one in ("SET", "COPIED")}
    Path(job.runtime.output_dir, "facts.json").write_text(json.dumps(facts))
    return Loss(cfg.lr * cfg.seed)


if __name__ == "__main__":
    main()
"""
CONFIG = """
lr: 0.1
seed: 1
seconds: 0
bad: []
trace: ${oc.env:TRACE}
hydra:
  job: {env_copy: [COPIED], env_set: {SET: "1"}}
  callbacks: {notes: {_target_: __main__.Notes}}
"""


class Scripts:
    """Sweeps of ``train.py``, whose jobs note that they began."""

    def __init__(self, hpctk: Hpctk) -> None:
        self._hpctk, self.trace = hpctk, Path("trace").absolute()
        Path("conf").mkdir()
        Path("conf/config.yaml").write_text(CONFIG)
        Path("train.py").write_text(SCRIPT)

    def environment(self) -> dict[str, str]:
        return self._hpctk.environment({"COPIED": "yes", "TRACE": str(self.trace)})

    def run(self, *words: str, launcher: str = "hpctk", code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "train.py", "-m", f"hydra/launcher={launcher}", *words],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def began(self) -> list[list[str]]:
        """Number, learning rate, seed and process of each job that began."""
        text = self.trace.read_text() if self.trace.exists() else ""
        return [line.split() for line in text.splitlines()]


@pytest.fixture
def scripts(hpctk: Hpctk) -> Scripts:
    return Scripts(hpctk)


SOAK = pytest.mark.soak  # each script takes 3 s of a core

# The published tests set no version_base, of which Hydra warns.
OF_1_1 = pytest.mark.filterwarnings(r"ignore:\s*Future Hydra versions:UserWarning")


@OF_1_1
@pytest.mark.parametrize(("launcher_name", "overrides"), [("hpctk", [])])
class TestLauncher(LauncherTestSuite):
    # Of Hydra 1.4: frames of the task in the traceback. Here its text is the cause.
    test_failure_preserves_task_traceback = None


@pytest.mark.soak  # the tests below start such scripts
@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=hpctk"])]
)
class TestIntegration(IntegrationTestSuite):
    pass


def _files(root: Path) -> dict[str, str]:
    """The files of a sweep, without times, its own directory, and the launcher."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_file() and not name.startswith(".hpctk"):
            text = path.read_text().replace(str(root), "ROOT").replace(root.name, "ROOT")
            text = re.sub(r"  launcher:\n(    .*\n)+", "", text)
            text = re.sub(r"hydra/launcher: \w+|- hydra/launcher=\w+\n", "", text)
            found[name] = re.sub(r"\d+-\d+-\d+ [\d:,]+", "TIME", text)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["lr=0.1,0.2", "hydra.job.chdir=true", "hydra.sweep.subdir=${hydra.job.override_dirname}"],
        pytest.param(["lr=0.1,0.2", "seed=1,2"], marks=SOAK),
        pytest.param(
            ["lr=0.1", "seed=1,1", "hydra.sweeper.max_batch_size=1", "hydra.job.name=other"],
            marks=SOAK,
        ),
    ],
    ids=["chdir", "plain", "batches"],
)
def test_a_sweep_leaves_the_files_of_the_basic_launcher(scripts: Scripts, words: list[str]) -> None:
    for launcher in ("basic", "hpctk"):
        scripts.run(*words, f"hydra.sweep.dir=sweeps/of-{launcher}", launcher=launcher)
    basic, own = (_files(Path("sweeps", f"of-{one}").absolute()) for one in ("basic", "hpctk"))

    assert own == basic
    assert len(own) > 6


def numbers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.isdigit())


@pytest.mark.parametrize(
    ("rule", "again", "said"),
    [
        ("rerun", ["0", "1", "2"], "main changed: jobs run again"),
        pytest.param("keep", ["1"], "2 of 3 jobs are done", marks=SOAK),
        pytest.param("error", [], "the code of main changed", marks=SOAK),
    ],
)
def test_the_code_changed_after_a_job_failed(
    scripts: Scripts, rule: str, again: list[str], said: str
) -> None:
    line = ["lr=0.1,0.2,0.3", "bad=[0.2]", "hydra.sweep.dir=sweep"]
    assert "ValueError: lr 0.2 is bad" in scripts.run(*line, code=1)
    assert "failed: ValueError" in scripts.run(*line, code=1)
    assert len(scripts.began()) == 3
    Path("train.py").write_text(SCRIPT.replace("if cfg.lr in cfg.bad", "if cfg.lr > 9"))

    out = scripts.run(*line, f"hydra.launcher.on_change={rule}", code=int(rule == "error"))

    assert said in out
    assert sorted(row[0] for row in scripts.began()[3:]) == again
    assert numbers(Path("sweep")) == [*"012"]


def test_changed_code_begins_another_directory_and_a_changed_configuration_runs_again(
    scripts: Scripts,
) -> None:
    scripts.run("lr=0.1,0.2")
    Path("train.py").write_text(SCRIPT.replace("cfg.lr * cfg.seed", "cfg.lr + cfg.seed"))

    assert "main changed: jobs run again" in scripts.run("lr=0.1,0.2")

    roots = sorted(Path("multirun").glob("*/*/.hpctk"))
    values = [[row["value"] for row in Run.open(root).results()] for root in roots]
    assert values == [[0.1, 0.2], [1.1, 1.2]]
    assert [numbers(root.parent) for root in roots] == [["0", "1"]] * 2

    Path("conf/config.yaml").write_text(CONFIG.replace("seed: 1", "seed: 3"))
    scripts.run("lr=0.1,0.2", f"hydra.sweep.dir={roots[1].parent}")

    assert sorted(row[:3] for row in scripts.began()[4:]) == [["2", "0.1", "3"], ["3", "0.2", "3"]]


@pytest.mark.parametrize(
    ("words", "code", "began"),
    [
        ([], 1, ["0", "1"]),
        (["hydra.launcher.fail_sweep=false"], 0, [*"012345"]),
        pytest.param(["hydra.launcher.max_attempts=2"], 1, ["0", "0", "1", "1"], marks=SOAK),
    ],
)
def test_failed_jobs_end_the_sweep_or_not(
    scripts: Scripts, words: list[str], code: int, began: list[str]
) -> None:
    batches = "hydra.sweeper.max_batch_size=2"
    out = scripts.run("lr=0.1,0.2,0.3", "seed=1,2", "bad=[0.1]", batches, *words, code=code)

    assert "#1 : failed: ValueError: lr 0.1 is bad" in out
    assert sorted(row[0] for row in scripts.began()) == began


def test_a_sweep_is_submitted_and_collected_later(scripts: Scripts, hpctk: Hpctk) -> None:
    line = ["lr=0.1,0.2", "hydra.launcher.workers=0"]
    out = scripts.run(*line, "hydra.launcher.wait=false")
    assert "the same line without hydra.launcher.wait=false waits for the results" in out
    assert scripts.began() == []
    (root,) = Path("multirun").glob("*/*/.hpctk")
    assert hpctk("work", root, "--idle-exit", "1s", env=scripts.environment()).code == 0

    assert "2 of 2 jobs are done" in scripts.run(*line)
    assert "2 of 2 jobs are done" in scripts.run(*line, "hydra.launcher.wait=false")
    assert len(scripts.began()) == 2


OTHER_SETTINGS = [
    (["hydra.launcher.wait=false"], "wait=false: local workers end with this script"),
    (["hydra.launcher.run=runs/items"], "runs/items was created with other"),
    (["+hydra.launcher.slurm.time=240"], "hydra.launcher.slurm.time: 240 is not text"),
    (["+hydra.launcher.slurm={nodes: 0, cluster: generic}"], "--nodes: 0 is not"),
]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra.launcher.on_change=never"], "on_change must be rerun, keep or error, got 'never'"),
        (["+hydra.launcher.slurm.nodez=2"], "slurm: No such option '--nodez'"),
        *(pytest.param(*one, marks=SOAK) for one in OTHER_SETTINGS),
    ],
)
def test_settings_that_are_not_valid_are_named_in_one_line(
    scripts: Scripts, hpctk: Hpctk, words: list[str], said: str
) -> None:
    Path("items.jsonl").write_text('{"a": 1}\n')
    assert hpctk("init", "runs/items", "--items", "items.jsonl", "--command", "true").code == 0

    out = scripts.run("lr=0.1", *words, code=1)

    assert said in out
    assert "Traceback" not in out
    assert scripts.began() == []
