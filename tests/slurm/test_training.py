"""Trainings on a real Slurm: the losses of one process, on two nodes, killed, warned and preempted.

All jobs run once, side by side, and every test looks at what came of them. Their ranks take minutes
of two cores, so they are for 'make soak'. In 'make test', test_launch.py kills a rank,
test_train_examples.py a training, and test_templates.py warns a job.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.held_training import HELD
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import MEASURED, wait_until
from tests.slurm.templatesite import Site

# In one process: all tests look at the same jobs.
pytestmark = [
    *(pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)),
    # This process imports none: each that collects the tests would take seconds of a core for it.
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"),
    pytest.mark.xdist_group("training"),
]

REPOSITORY = Path(__file__).parents[2]
HELD_TRAINING = str(Path(__file__).with_name("held_training.py"))
STEPS = 14
TRAINING = (
    *("--texts", "64", "--steps", str(STEPS), "--batch-size", "8"),
    *("--model", "plain", "--optimizer", "sgd", "--lr", "0.1"),
    *("--precision", "float32", "--checkpoint-every", "5"),
)
RANKS = {"nodes": 2, "tasks": 2, "warned": 2, "preempted": 1}
"""Of each training; few, since a process takes seconds of a core to import torch."""
TREES = ("xgboost", "lightgbm")
CORES = len(os.sched_getaffinity(0))
PLAIN: dict[str, Any] = {"ntasks_per_node": None, "backend": "gloo", "cpus_per_task": 2}


@dataclass
class Trained:
    """What came of all the jobs."""

    site: Site
    ends: dict[str, tuple[str, int | None, int | None]] = field(default_factory=dict)
    """State, exit code and restarts, by the job's name."""
    said: dict[str, str] = field(default_factory=dict)
    held: dict[str, list[list[str]]] = field(default_factory=dict)
    """What each rank said where it waited."""
    killed_at: float = 0.0
    """Epoch seconds of the SIGKILL for a rank of "nodes"."""

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A line per step that was made."""
        lines = (self.site.cwd / "runs" / name / "loss.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, name: str) -> dict[int, float]:
        """The last loss of every step."""
        return {one["step"]: one["loss"] for one in self.lines(name)}

    def steps(self, name: str) -> list[int]:
        return [one["step"] for one in self.lines(name)]


@pytest.fixture(scope="module")
def trained(lab: LabUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    site = Site(lab, tmp_path_factory.mktemp("trainings"))
    data = one_process(site)
    for name in RANKS:
        run = site.cwd / "runs" / name / "data"
        run.mkdir(parents=True)
        (run / data.name).write_bytes(data.read_bytes())
    (site.cwd / "it's").write_text("staged as it is")
    staged = {"stage": ("it's",), "stage_dir": str(site.cwd / "local")}
    forms: dict[str, dict[str, Any]] = {
        "nodes": {"template": "train-multi-node", "nodes": 2, "nproc_per_node": 1,
                  "nodelist": "n[1-2]", **staged},
        "tasks": {"template": "train-multi-node", "nodes": 2, "nproc_per_node": 1,
                  "nodelist": "n[1-2]", "launch": "task-per-gpu", "cpus_per_task": 1,
                  "mem_bind": "local", "distribution": "block:cyclic", **staged},
        "warned": {"template": "train-multi-gpu", "nodes": 1, "gpus_per_node": 2,
                   "nodelist": "n3"},
        "preempted": {"template": "train-single-gpu", "nodes": 1, "exclusive": True,
                      "nodelist": "n4"},
    }  # fmt: skip
    jobs = {name: start(site, name, **forms[name]) for name in RANKS}
    jobs |= {name: trees(site, name) for name in TREES}
    found = Trained(site)
    for name, number in RANKS.items():
        found.held[name] = wait_for_ranks(site, name, jobs[name], number)

    # On the lab all nodes' processes are this machine's.
    found.killed_at = time.time()
    os.kill(int(found.held["nodes"][1][0]), signal.SIGKILL)
    for name in ("tasks", "warned"):
        site.warn(jobs[name])
    lab.wait_for(lab.preempt("--nodes=1", "--nodelist=n4"))
    for name, job in jobs.items():
        found.ends[name] = site.end_of(job)
        found.said[name] = site.said(job)
    return found


def one_process(site: Site) -> Path:
    """Train without Slurm; the texts as tokens."""
    words = [sys.executable, str(REPOSITORY / "examples/train_ddp.py"), *TRAINING]
    run = site.cwd / "runs" / "alone"
    done = subprocess.run(
        [*words, "--output", str(run)], cwd=site.cwd, check=False,
        env={**site.lab.env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return next((run / "data").iterdir())


def trees(site: Site, library: str) -> str:
    """Train trees beside the others."""
    script = str(REPOSITORY / "examples/train_trees.py")
    command = (script, "--library", library, "--rows", "2000", "--rounds", "20")
    return site.submit(
        "train-cpu", job_name=library, command=command, nodes=1, ntasks_per_node=None,
        cpus_per_task=CORES, nodelist="n5", hint="nomultithread",
    )  # fmt: skip


def start(site: Site, name: str, template: str, **fields: Any) -> str:
    named = {**PLAIN, "job_name": name, **fields}
    return site.submit(template, **named, command=(HELD_TRAINING, *TRAINING))


def wait_for_ranks(site: Site, name: str, job: str, ranks: int) -> list[list[str]]:
    """Until all ranks of a job wait; what each says."""
    paths = [site.cwd / "runs" / name / f"held-{rank}" for rank in range(ranks)]
    wait_until(lambda: all(path.exists() for path in paths), lambda: f"{name}:\n{site.said(job)}")
    return [path.read_text().split("\n") for path in paths]


@pytest.mark.soak
@pytest.mark.parametrize("name", RANKS)
def test_losses_of_a_training_are_those_of_one_process(trained: Trained, name: str) -> None:
    assert trained.ends[name][:2] == ("COMPLETED", 0), trained.said[name]
    alone, found = trained.losses("alone"), trained.losses(name)

    difference = max(abs(found[step] - loss) for step, loss in alone.items())

    MEASURED.append(f"training {name}: largest difference of a loss {difference:.1e}")
    assert found.keys() == alone.keys() == set(range(1, STEPS + 1))
    assert difference <= 1e-5


@pytest.mark.soak
def test_a_killed_rank_starts_again_inside_its_job(trained: Trained) -> None:
    assert trained.ends["nodes"] == ("COMPLETED", 0, 0)
    # The checkpoint is that of step 5, and the rank was killed after step 6.
    assert trained.steps("nodes") == [*range(1, HELD + 1), *range(HELD, STEPS + 1)]
    again = next(one["at"] for one in trained.lines("nodes") if one["restart"] == 1)
    MEASURED.append(f"training nodes: {again - trained.killed_at:.1f} s from SIGKILL to a step")
    assert again > trained.killed_at


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tasks", "warned"])
def test_a_warned_training_saves_its_step_and_is_requeued(trained: Trained, name: str) -> None:
    assert trained.ends[name] == ("COMPLETED", 0, 1)
    assert trained.said[name].count("requeueing") == 1
    # No step is made twice, since it was saved.
    assert trained.steps(name) == [*range(1, STEPS + 1)]


@pytest.mark.soak
def test_a_preempted_training_saves_its_step_and_goes_on_behind_it(trained: Trained) -> None:
    """Slurm sends SIGTERM, and leaves it KillWait to save."""
    assert trained.ends["preempted"] == ("COMPLETED", 0, 1)
    assert "requeueing" not in trained.said["preempted"]
    assert trained.steps("preempted") == [*range(1, STEPS + 1)]


@pytest.mark.soak
def test_what_is_staged_is_there_for_every_rank_and_removed_at_the_end(trained: Trained) -> None:
    for name, starts in {"nodes": 1, "tasks": 2}.items():
        assert [words[1] for words in trained.held[name]] == ["staged as it is"] * RANKS[name]
        found = re.findall(r"(n\d): staged it's: ", trained.said[name])
        assert sorted(found) == sorted(["n1", "n2"] * starts)
    assert list((trained.site.cwd / "local").iterdir()) == []


def submit_staging(site: Site, program: str) -> tuple[str, Path]:
    """A job with copies of "data"; its number, and the node's directory for them."""
    (site.cwd / "script.py").write_text(program)
    local = site.cwd / "local"
    job = site.submit(
        "train-cpu", nodes=1, ntasks_per_node=None, cpus_per_task=1, command=("script.py",),
        stage=("data",), stage_dir=str(local),
    )  # fmt: skip
    return job, local


def test_what_is_staged_is_removed_when_the_job_is_cancelled(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    """Slurm lets a script that is cancelled start no step any more."""
    site = Site(lab, tmp_path)
    (tmp_path / "data").mkdir()
    job, local = submit_staging(site, "import time; print('up'); time.sleep(3600)")
    wait_until(lambda: "0: up" in site.said(job), lambda: site.said(job))
    copies = list(local.glob("*/*/data"))

    lab.run("scancel", job)

    assert site.end_of(job)[0] == "CANCELLED"
    assert len(copies) == 1
    wait_until(lambda: not any(local.iterdir()), "the removal of the copies")


def test_a_node_that_cannot_stage_ends_the_job_before_a_rank_starts(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    site = Site(lab, tmp_path)
    job, _ = submit_staging(site, "print('up')")

    assert site.end_of(job) == ("FAILED", 1, 0)
    assert "error: cannot stage data: No such file or directory" in site.said(job)
    assert "a node could not stage its copies: see above" in site.said(job)
    assert "0: up" not in site.said(job)


@pytest.mark.soak
@pytest.mark.parametrize("library", TREES)
def test_trees_are_trained_with_all_cores_that_were_granted(trained: Trained, library: str) -> None:
    assert trained.ends[library] == ("COMPLETED", 0, 0), trained.said[library]
    line = next(line for line in trained.said[library].splitlines() if '"threads"' in line)
    told = json.loads(line.partition(": ")[2])

    MEASURED.append(f"training {library}: {told['busy_cores']} of {CORES} cores were busy")
    assert (told["threads"], told["rounds"], told["resumed_from"]) == (CORES, 20, 0)
    assert told["test_error"] < 0.25
    assert Path(told["model"]).is_relative_to(trained.site.cwd / "runs" / library)


ADD_UP = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {total.item():.0f}", flush=True)
dist.destroy_process_group()
"""


def test_a_plain_script_starts_torchrun_on_all_nodes(lab: LabUnderTest, tmp_path: Path) -> None:
    """The nodes of a lab are this machine, which has none of their names."""
    site = Site(lab, tmp_path)
    (tmp_path / "add up.py").write_text(ADD_UP)
    script = site.script(
        "train-multi-node", nodes=2, nproc_per_node=1, ntasks_per_node=None, cpus_per_task=2,
        plain=True, command=("add up.py",),
    )  # fmt: skip
    text = script.read_text()
    named = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    assert named in text
    script.write_text(text.replace(named, "127.0.0.1"))

    job = lab.sbatch(script, cwd=tmp_path)

    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    said = re.findall("rank [01] of 2 has 1", site.said(job))
    assert len(set(said)) == 2, site.said(job)
