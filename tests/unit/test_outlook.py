"""What 'hpctk submit' says of a job, its cost, and the items left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.planning.nodes import Ask, ask_of, asked_line, lacks
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.render.spec import ScriptSpec
from hpc_toolkit.submit import keeping
from hpc_toolkit.submit.keeping import jobs_with_work
from hpc_toolkit.submit.submission import left_lines
from tests.toyrun import ToyRun

SITE = Cluster(
    name="site",
    file="site.toml",
    nodes=64,
    gpus_per_node=4,
    price_per_gpu_hour=2.0,
    currency="USD",
    max_walltime_s=24 * 3600,
)


def ask(
    nodes: int, *, hours: float = 4, site: Cluster = SITE, jobs: int = 1, dependency: Any = None
) -> Ask:
    spec = ScriptSpec(
        python="/usr/bin/python3",
        nodes=nodes,
        gpus_per_node=site.gpus_per_node or 0,
        ntasks_per_node=4,
        time=int(hours * 3600),
        dependency=dependency,
    )
    return ask_of(spec, site, jobs=jobs)


def measured(
    root: Path, *, items: int = 136, done: int = 100, sealed: bool = True, seconds: float = 3600.0
) -> Run:
    """A run whose first items took this long each, by a worker that has left."""
    toy = ToyRun(root / "run", items, unit=1, sealed=sealed)
    worker = toy.worker("w1")
    for item in range(done):
        worker.claim(toy.unit_name(item))
        worker.attempt(item, seconds=seconds)
        worker.release(seconds=seconds)
    worker.finish()
    return toy.reopen()


def test_the_request_is_shown_with_the_cost_of_all_of_its_time() -> None:
    plain = Cluster(name="plain", file="plain.toml")

    assert asked_line(ask(8)) == (
        "requests 8 nodes with 4 GPUs for 04:00:00: up to 128 GPU-hours, 256 USD"
    )
    assert asked_line(ask(1, hours=0.5, site=plain, jobs=3)) == (
        "each of 3 jobs requests 1 node for 00:30:00: up to 0.50 node-hours;"
        " together 1.50 node-hours"
    )


_LONG = "its items need 5 h 00 min of time"


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"gpus": 4}, ["its items need 4 GPUs; no worker of this job has more than 1"]),
        ({"time": "5h"}, [f"{_LONG}; no worker of this job has more than 4 h 00 min of time"]),
        ({"gpus": 1, "time": "2h", "licence": 1, "cpus": 1}, []),
        ({"cpus": 64}, ["its items need 64 CPUs; no worker of this job has more than 1"]),
    ],
)
def test_a_stage_that_no_worker_of_the_job_could_hold_is_named(
    needs: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", [{"n": n} for n in range(9)], command="true", needs=needs)

    assert left_lines(run, ask(1))[1] == [f"stage items: {one}" for one in said]


def test_a_time_limit_that_is_too_short_is_named_with_one_that_is_enough(tmp_path: Path) -> None:
    run = measured(tmp_path)

    (short,) = left_lines(run, ask(3, hours=2))[1]
    (longest,) = left_lines(run, ask(3, hours=0.5))[1]
    chain = left_lines(run, ask(3, hours=2, jobs=9, dependency="singleton"))[1]
    chained = left_lines(run, ask(3, hours=0.5, jobs=99, dependency="singleton"))[1]

    assert short.startswith("02:00:00 is too short for all items; --time 0")
    assert longest.startswith("00:30:00 is probably too short for the longest item")
    assert chain == []
    assert chained == [longest]


@pytest.mark.parametrize(
    ("done", "seconds", "hours", "jobs"),
    [
        *((0, 60.0, 4, 10), (16, 60.0, 4, 2), (16, 3600.0, 4, 6), (32, 60.0, 4, 1)),
        *((38, 1.0, 4, 1), (40, 60.0, 4, 0)),
        # Short jobs are worth half of their time limit.
        *((16, 60.0, 1 / 60, 6), (16, 60.0, 1 / 6, 2)),
    ],
)
def test_no_more_jobs_are_kept_than_have_work(
    tmp_path: Path, done: int, seconds: float, hours: float, jobs: int
) -> None:
    run = measured(tmp_path, items=40, done=done, seconds=seconds)

    assert jobs_with_work(run, ask(1, hours=hours)) == jobs


WITHOUT_GPUS = replace(SITE, gpus_per_node=0)


def test_a_shape_waits_without_a_job_for_what_others_must_do_first(tmp_path: Path) -> None:
    large = {"command": "true", "items": [{"n": 1}], "needs": {"memory": "1T", "gpus": 0}}
    after = {"command": "true", "after": "large", "needs": {"gpus": 1}}
    run = Run.create(tmp_path / "run", stages={"large": large, "after": after})
    site = replace(SITE, mem_per_node_mib=1000)

    assert jobs_with_work(run, ask(1, site=site)) == 0
    large["needs"] = {"gpus": 0}
    run = Run.create(tmp_path / "more", stages={"large": large, "after": after})
    assert jobs_with_work(run, ask(1, site=site)) == 1


@pytest.mark.parametrize(
    ("alone", "site", "jobs"), [(True, SITE, 1), (False, SITE, 0), (True, WITHOUT_GPUS, 0)]
)
def test_one_job_adds_the_items_that_follow_unless_another_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool, site: Cluster, jobs: int
) -> None:
    monkeypatch.setattr(keeping, "pending_needs", lambda _: [])
    first = {"command": "true", "items": [{"n": 1}], "needs": {"gpus": 0}}
    after = {"command": "true", "after": "first", "needs": {"gpus": 1}}
    run = Run.create(tmp_path / "run", stages={"first": first, "after": after})

    assert jobs_with_work(run, ask(1, site=site), alone=alone) == jobs


@pytest.mark.parametrize(
    ("given", "workers", "held", "refused"),
    [
        ({"ntasks_per_node": 4}, 8, {"cpus": 16, "gpus": 1}, {"cpus": 17}),
        # Of each task the first worker has 8 CPUs, a GPU and half of the memory.
        ({"ntasks_per_node": 4, "workers_per_task": 9}, 72, {"cpus": 8, "gpus": 1}, {"cpus": 9}),
        ({"workers_per_task": 9, "mem": 64 << 10}, 18, {"memory": 32 << 30}, {"memory": 33 << 30}),
        ({"workers_per_task": 2}, 4, {"cpus": 8}, {"nodes": 2}),
        ({"one_rank": True}, 1, {"nodes": 2, "cpus": 16}, {"nodes": 3}),
    ],
)
def test_workers_of_a_job_hold_what_its_script_gives_them(
    given: dict[str, Any], workers: int, held: dict[str, Any], refused: dict[str, Any]
) -> None:
    fields = {"ntasks_per_node": 1, "python": "/usr/bin/python3", "cpus_per_task": 16, **given}

    found = ask_of(ScriptSpec(nodes=2, gpus_per_node=4, **fields), SITE)

    assert found.workers == workers
    assert lacks(found.node, None, held) == ""
    assert "no worker of this job has more than" in lacks(found.node, None, refused)
