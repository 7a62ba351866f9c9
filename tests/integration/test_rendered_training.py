"""A training's script, run by bash with programs that stand in for Slurm's and the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import ScriptSpec
from tests.integration.test_rendered_script import HOSTILE_NAME, FakeSlurm, slurm

__all__ = ["slurm"]


@pytest.fixture
def node(slurm: FakeSlurm) -> FakeSlurm:
    slurm.environ |= {"SLURMD_NODENAME": "n1", "SLURM_LOCALID": "1"}
    return slurm


def script(node: FakeSlurm, template: str = "train-multi-node", **fields: Any) -> str:
    given = {"python": str(node.python), "command": ("train.py",), "job_name": "job", **fields}
    return render_script(ScriptSpec(**given), load_cluster("generic"), template)


def test_words_of_a_training_arrive_as_they_were_written(node: FakeSlurm) -> None:
    words = ("train.py", HOSTILE_NAME, ":", "a b")
    run_dir = f"runs/{HOSTILE_NAME}"

    code, output = node.run(script(node, nodes=2, command=words, run_dir=run_dir), "--lr", "$x")

    assert code == 0, output
    assert node.calls("python")[-1] == [
        *("-P", "-m", "hpc_toolkit", "launch", f"--run-dir={run_dir}", "--backend=gloo"),
        *("--nproc-per-node=1", "--max-restarts=3", *words, "--lr", "$x"),
    ]
    assert (node.root / run_dir).is_dir()
    assert not list(node.root.rglob("canary"))


@pytest.mark.parametrize(
    ("answer", "expected", "requeued"), [(0, 0, False), (75, 0, True), (3, 3, False)]
)
def test_75_alone_starts_a_training_again(
    node: FakeSlurm, answer: int, expected: int, *, requeued: bool
) -> None:
    node.answer(work_code=answer)

    code, _ = node.run(script(node, nodes=2))

    assert (code, node.requeued) == (expected, requeued)


@pytest.mark.parametrize("variable", ["SLURM_TMPDIR", "TMPDIR", ""])
def test_copies_lie_on_the_jobs_disk_else_on_the_nodes(
    node: FakeSlurm, tmp_path: Path, variable: str
) -> None:
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        node.environ.pop(name, None)
        (tmp_path / name).mkdir()
    if variable:
        node.environ["TMPDIR"] = str(tmp_path / "TMPDIR")
        node.environ[variable] = str(tmp_path / variable)
    named = {"stage_dir": str(tmp_path / "TMPDIR")} if not variable else {}

    code, output = node.run(script(node, stage=("/data/it's", "x"), **named))

    assert code == 0, output
    place = f"{tmp_path / (variable or 'TMPDIR')}/hpctk-17.0"
    (staging,) = [call for call in node.calls("python") if "stage" in call]
    assert staging == [
        *("-Pm", "hpc_toolkit", "stage", place, "--users", "1", "--", "/data/it's", "x")
    ]
    assert node.rank_environ["HPCTK_STAGED_1"] == f"{place}/n1/it's"
    assert node.rank_environ["HPCTK_STAGED"] == f"{place}/n1"


@pytest.mark.parametrize(("users", "left"), [("0 1", {"0"}), ("1", set())])
def test_copies_stay_while_another_task_of_the_node_uses_them(
    node: FakeSlurm, users: str, left: set[str]
) -> None:
    node.answer(users=users)
    # The job itself removes in the end what ranks that never started have left: 'rm -rf -- PLACE'.
    remove = node.root / "bin/rm"
    remove.write_text('#!/bin/bash\n[[ $2 == -- ]] || exec /bin/rm "$@"\n')
    remove.chmod(0o755)

    code, output = node.run(script(node, stage=("x",), stage_dir=str(node.root / "local")))

    assert code == 0, output
    place = node.root / "local/hpctk-17.0"
    assert {path.name for path in place.glob("n1/.users/*")} == left
    assert place.exists() is bool(left)
