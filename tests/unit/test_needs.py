"""What stages need and workers have: reading, the filter, and what is said of needs nobody has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError, ItemsError, RunError
from hpc_toolkit.queue.left import pending_needs
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import read_manifest
from hpc_toolkit.system.needs import (
    lacking,
    needs_after,
    parse_has,
    parse_needs,
    retry_of,
    split,
    submit_options,
    unmet,
)
from tests.toyrun import spec_of

READ: list[tuple[dict[str, Any] | str, dict[str, Any]]] = [
    ("gpus=1,memory=40G", {"gpus": 1, "memory": 40 << 30}),
    ("gpus=0.5,cpus=4,time=2h", {"gpus": 0.5, "cpus": 4, "time": 7200.0}),
    ("features=a100+nvlink,licence=2", {"features": ["a100", "nvlink"], "licence": 2}),
    ("nodes=2", {"nodes": 2}),
    ({"gpus": 0, "gpu_memory": "80G"}, {"gpus": 0, "gpu_memory": 80 << 30}),
    ({"features": ["a100"], "licence": 1.5}, {"features": ["a100"], "licence": 1.5}),
]
WRONG: list[tuple[Any, str]] = [
    ("gpus", "'gpus' is not NAME=VALUE"),
    ("gpus=", "is not NAME=VALUE"),
    ("gpu=1", "unknown key 'gpu'"),
    ("gpu-memory=1G", "unknown key 'gpu-memory'"),
    ("gpus=1.5", "here.gpus: 1.5 is not 0, a fraction below 1 or a whole number"),
    ("gpus=-1", "here.gpus: -1 is not"),
    ("cpus=0", "here.cpus: 0 is not a whole number from 1"),
    ("nodes=0", "here.nodes: 0 is not a whole number from 1"),
    ("nodes=two", "here.nodes: nan is not a whole number from 1"),
    ({"nodes": "two"}, "here.nodes: nan is not a whole number from 1"),
    ({"nodes": 1.5}, "here.nodes: 1.5 is not a whole number from 1"),
    ("node=2", "unknown key 'node'"),
    ("memory=40", "here.memory: '40' has no unit"),
    ("time=2x", "here.time: '2x' is not a duration"),
    ({"features": []}, "is not a list of names"),
    ({"features": ["a b"]}, "is not a list of names"),
    ({"cpus": True}, "True is not a whole number"),
    (["gpus"], "here: ['gpus'] has no names and values"),
    ({"a b": 1}, "'a b' is not a name"),
    ({"licence": float("inf")}, "inf is not a number from 0"),
    ({"licence": "many"}, "is not a number from 0"),
]


@pytest.mark.parametrize(("written", "read"), READ)
def test_needs_are_read_and_read_again(written: dict[str, Any] | str, read: dict[str, Any]) -> None:
    found = parse_needs(split(written, "x") if isinstance(written, str) else written, "x")

    assert found == read
    assert parse_needs(found, "x") == found


@pytest.mark.parametrize(("written", "message"), WRONG)
def test_wrong_needs_are_refused_with_their_place(
    written: dict[str, Any] | str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_needs(split(written, "here") if isinstance(written, str) else written, "here")
    assert message in refused.value.message
    assert refused.value.hint
    if isinstance(written, dict):
        stage = {"items": [{"i": 1}], "command": "true", "needs": written}
        with pytest.raises(ConfigError, match=r"stages\.a: needs"):
            Run.create(tmp_path / "run", stages={"a": stage})


AMOUNTS = st.dictionaries(
    st.sampled_from(["gpus", "cpus", "memory", "gpu_memory", "licence"]), st.integers(1, 9)
)
FEATURES = st.lists(st.sampled_from(["a100", "h100", "nvlink"]), min_size=1, unique=True)


@given(AMOUNTS, AMOUNTS, FEATURES, FEATURES)
def test_a_worker_lacks_exactly_what_is_more_than_it_has(
    needs: dict[str, Any], has: dict[str, Any], wanted: list[str], own: list[str]
) -> None:
    missing = lacking({**needs, "features": wanted}, {**has, "features": own})

    assert ("features" in missing) == (not set(wanted) <= set(own))
    assert {*missing} - {"features"} == {k for k, v in needs.items() if v > has.get(k, 0)}
    # More is never worse, and a worker can hold what it has.
    more = {key: value + 1 for key, value in has.items()}
    assert set(lacking(needs, more)) <= set(lacking(needs, has))
    assert lacking(has, has) == []
    assert bool(unmet(needs, [has])) == bool(lacking(needs, has))
    assert not unmet(needs, [])


@pytest.mark.parametrize(
    ("needs", "workers", "said"),
    [
        ({"time": 7200}, [{"gpus": 1}], ""),
        (
            {"time": 7200},
            [{"time": 60}, {"time": 3600}],
            "need 2 h 00 min of time; no worker has more than 1 h 00 min of time",
        ),
        ({"nodes": 2}, [{"nodes": 1}], "need 2 nodes; no worker has more than 1"),
        ({"nodes": 2, "gpus": 1}, [{"nodes": 4, "gpus": 1}], ""),
        ({"gpus": 4}, [{"gpus": 0}, {"gpus": 1}], "need 4 GPUs; no worker has more than 1"),
        ({"gpus": 4}, [{"gpus": 0}, {"gpus": 4}], ""),
        ({"gpus": 0.333}, [{"gpus": 1 / 3}], ""),
        ({"gpus": 0.5}, [{"cpus": 1}], "need 0.5 GPUs; no worker has more than 0"),
        (
            {"memory": 40 << 30},
            [{"memory": 8 << 30}],
            "need 40.0 GiB of memory; no worker has more than 8.0 GiB of memory",
        ),
        (
            {"features": ["a100"]},
            [{"features": ["h100"]}],
            "need the feature a100; no worker has all of that",
        ),
        (
            {"gpus": 1, "cpus": 8},
            [{"gpus": 1, "cpus": 1}, {"gpus": 0, "cpus": 8}],
            "need 1 GPU, 8 CPUs; no worker has all of that",
        ),
    ],
)
def test_needs_that_no_worker_has_are_named(
    needs: dict[str, Any], workers: list[dict[str, Any]], said: str
) -> None:
    assert unmet(needs, workers) == said


def test_time_is_what_is_left_of_a_worker() -> None:
    assert lacking({"time": 60.0}, {}, 59.0) == ["time"]
    assert lacking({"time": 60.0}, {}, 60.0) == []
    assert lacking({"time": 60.0}, {}) == []
    assert parse_has(["licence=2", "a100"], "--has") == {"licence": 2, "features": ["a100"]}


def test_run_json_keeps_needs_and_priority_and_refuses_damaged_ones(tmp_path: Path) -> None:
    made = Run.create(tmp_path / "run", [{"i": 1}], command="true", needs={"memory": "1G"})
    stage = read_manifest(made.root).stages[0]
    text = made.paths.manifest.read_text()

    assert (stage.needs, stage.priority) == ({"memory": 1 << 30}, None)
    made.paths.manifest.write_text(text.replace(str(1 << 30), '"x"'))
    with pytest.raises(RunError, match=r"damaged.*needs of items\.memory"):
        Run.open(made.root)
    plain = Run.create(tmp_path / "plain", [{"i": 1}], command="true", needs={})
    assert "needs" not in plain.paths.manifest.read_text()


OOM = {"on": "oom", "memory": "x2", "up_to": "5G"}
LATE = {"on": "timeout", "time": "x1.5", "up_to": "4h"}
GPU = {"on": "gpu_oom", "gpu_memory": "x2", "up_to": "80G"}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("needs", "retry", "steps"),
    [
        ({"memory": GIB, "gpus": 1}, OOM, [1, 2, 4, 5, 5, 5]),
        (
            {"gpus": 1, "gpu_memory": 20 * GIB},
            {"on": "gpu_oom", "gpu_memory": "+8G", "up_to": "40G"},
            [20, 28, 36, 40, 40],
        ),
    ],
)
def test_needs_grow_by_a_factor_or_a_step_up_to_the_limit(
    needs: dict[str, Any], retry: dict[str, Any], steps: list[int]
) -> None:
    stage = spec_of(needs=needs, retry=retry)
    name = next(one for one in needs if "memory" in one)

    found = [needs_after(stage, number) for number in range(len(steps))]

    assert [one[name] / GIB for one in found] == steps
    assert all(one == {**needs, name: one[name]} for one in found)
    grows = retry_of(stage)
    assert grows is not None
    assert grows.steps == 3


@pytest.mark.parametrize("needs", [None, {"time": 7200}])
def test_an_item_gets_more_time_and_needs_a_worker_that_has_it(
    needs: dict[str, Any] | None,
) -> None:
    stage = spec_of(needs=needs, timeout_s=3600.0, retry=LATE)
    retry = retry_of(stage)

    assert retry is not None
    assert [retry.amount(number) for number in range(5)] == [3600, 5400, 8100, 12150, 14400]
    assert needs_after(stage, 0) == (needs or {})
    assert needs_after(stage, 1) == {"time": 7200 if needs else 5400}
    assert needs_after(stage, 4) == {"time": 14400}


@given(
    st.integers(1, 1 << 40),
    st.decimals("1.1", "999", places=3),
    st.integers(1, 1 << 45),
    st.integers(0, 400),
)
def test_needs_never_shrink_and_end_at_the_limit(
    base: int, factor: object, more: int, number: int
) -> None:
    up_to = base + more
    retry = {"on": "oom", "memory": f"x{factor}", "up_to": up_to}
    found = retry_of(spec_of(needs={"memory": base}, retry=retry))

    assert found is not None
    assert base <= found.amount(number) <= found.amount(number + 1) <= up_to
    assert found.amount(found.steps) == up_to
    assert base * found.factor ** (found.steps - 1) < up_to


@pytest.mark.parametrize(
    ("retry", "message"),
    [
        ("oom", "retry: on = '' is not 'oom', 'gpu_oom', 'timeout'"),
        ({"on": "error"}, "on = 'error' is not 'oom', 'gpu_oom', 'timeout'"),
        ({"on": "oom", "memory": "x2"}, "it has the keys on, memory, not on, memory and up_to"),
        (OOM | {"time": "x2"}, "it has the keys on, memory, up_to, time, not on, memory and up_to"),
        (OOM | {"memory": 2}, "retry.memory: 2 is not a factor from x1.1"),
        (OOM | {"memory": "x1"}, "retry.memory: 'x1' is not a factor from x1.1"),
        (OOM | {"memory": "+2"}, "retry.memory: '2' has no unit"),
        (OOM | {"memory": "+0G"}, "retry.memory"),
        (OOM | {"memory": "+4M"}, "retry.memory: it is raised over 400 times before up_to"),
        (OOM | {"up_to": 10**300}, "retry.memory: it is raised over 400 times before up_to"),
        (GPU, "on = 'gpu_oom' raises needs with gpu_memory, which the stage does not have"),
        (OOM | {"up_to": "5"}, "retry.up_to: '5' has no unit"),
        (OOM | {"up_to": True}, "retry.up_to: True is not a size"),
        (OOM | {"up_to": "1G"}, "retry.up_to: 1.0 GiB of memory is not more than the 1.0 GiB"),
        (LATE, "retry: on = 'timeout' raises a timeout, which the stage does not have"),
    ],
)
def test_a_wrong_retry_is_refused(retry: Any, message: str, tmp_path: Path) -> None:
    stage = {"items": [{"i": 1}], "command": "true", "needs": {"memory": "1G"}, "retry": retry}

    with pytest.raises(ConfigError) as refused:
        Run.create(tmp_path / "run", stages={"a": stage})

    assert refused.value.message.startswith("stages.a: retry")
    assert message in refused.value.message
    assert refused.value.hint


def test_a_retry_must_fit_the_other_settings(tmp_path: Path) -> None:
    items = [{"i": 1}]
    with pytest.raises(ConfigError, match="retry and no_retry both have 'timeout'"):
        Run.create(
            tmp_path / "b", items, command="true", timeout_s=60, no_retry="timeout", retry=LATE
        )
    made = Run.create(tmp_path / "c", items, command="true", timeout_s=60, retry=LATE)
    assert read_manifest(made.root).stages[0].retry == LATE


@pytest.mark.parametrize(
    ("needs", "options"),
    [
        ({"memory": GIB}, "--mem 1024M"),
        ({"time": 3600}, "--time 71"),
        ({"gpus": 2, "cpus": 4}, "--gpus-per-node 2 --ntasks-per-node 1 --cpus-per-task 4"),
        ({"gpus": 0, "memory": 1}, "--mem 1M"),
        ({"nodes": 2, "cpus": 8}, "--nodes 2 --one-rank --cpus-per-task 8"),
        ({"nodes": 1, "cpus": 8}, "--cpus-per-task 8"),
        ({"gpu_memory": 40 * GIB}, "--gpus-per-node 1 --ntasks-per-node 1 --gpu-type TYPE"),
        ({"memory": GIB, "licence": 1}, ""),
    ],
)
def test_a_job_that_can_hold_needs_is_named(needs: dict[str, Any], options: str) -> None:
    assert submit_options(needs) == options


def listed(tmp_path: Path, items: list[dict[str, Any]], **how: Any) -> Run:
    return Run.create(tmp_path / os.urandom(4).hex(), items, command="true", **how)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"i": 1, "needs": {"gpu": 1}}, "item 1: needs: unknown key 'gpu'"),
        ({"i": 1, "needs": {"memory": "x"}}, "item 1: needs.memory: 'x' is not"),
        ({"i": 1, "needs": {}, "priority": "5"}, "item 1: its priority '5' is not a whole number"),
        ({"i": 1, "needs": {}, "priority": True}, "item 1: its priority True is not a whole numb"),
        ({"i": 1, "needs": {"memory": "9G"}}, "item 1: retry.up_to: 5.0 GiB of memory is not more"),
        ({"i": 0, "needs": {"cpus": 1}}, "item 1 is a duplicate"),
    ],
)
def test_wrong_needs_of_an_item_are_refused(
    item: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ItemsError) as refused:
        listed(tmp_path, [{"i": 0}, item], needs={"memory": "1G"}, retry=OOM)
    assert message in refused.value.message
    assert refused.value.hint


def test_needs_are_taken_out_of_items_and_other_keys_of_these_names_stay(tmp_path: Path) -> None:
    items: list[dict[str, Any]] = [
        {"i": 0, "needs": {"gpus": 1}, "priority": 5},
        {"i": 1, "priority": 2},
        {"i": 2, "needs": "none"},
    ]
    run = listed(tmp_path, items)

    (path,) = run.paths.stage("items").items.iterdir()
    shown = [{"i": 0}, {"i": 1, "priority": 2}, {"i": 2, "needs": "none"}]
    assert [*map(json.loads, path.read_text().splitlines()[1:])] == shown
    assert run.manifest.stages[0].needs == {}
    different = [{"i": n, "needs": {"licence": n}} for n in range(1001)]
    with pytest.raises(ItemsError, match="item 1000: it is the first after 1000 different needs"):
        listed(tmp_path, different)
    plain = listed(tmp_path, [{"i": 1}], items_per_claim=1)
    assert plain.manifest.stages[0].needs is None


def test_items_with_needs_are_added_where_workers_look_for_them(tmp_path: Path) -> None:
    new: list[dict[str, Any]] = [{"i": 2, "needs": {"gpus": 1}}, {"i": 3}]
    plain = listed(tmp_path, [{"i": 1}], open_end=True)
    with pytest.raises(ItemsError, match="workers do not know that they may") as refused:
        plain.add(new)
    assert "--needs" in refused.value.hint

    run = listed(tmp_path, [{"i": 1}], open_end=True, needs={"cpus": 1})
    run.add(new)
    run.view.poll()
    assert pending_needs(run.view.stages["items"]) == [
        ({"cpus": 1, "gpus": 1}, 1, 1),
        ({"cpus": 1}, 2, 2),
    ]


WANTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(-1, 2), st.integers(-1, 1)), min_size=1
)


@given(WANTS, st.sampled_from([None, "g"]), st.sampled_from([None, 3]))
def test_a_unit_has_items_of_the_same_needs_and_group(
    fast_dir: Path, drawn: list[tuple[str, int, int]], group_by: str | None, size: int | None
) -> None:
    given_items, wanted = [], []
    for number, (group, gpus, priority) in enumerate(drawn):
        own: dict[str, Any] = {"needs": {"gpus": gpus}} if gpus >= 0 else {}
        own |= {"priority": priority} if own and priority >= 0 else {}
        given_items.append({"n": number, "g": group, **own})
        needs = {"cpus": 2} | own.get("needs", {})
        wanted.append((needs, own.get("priority")))
    cut = {"group_by": group_by, "items_per_claim": size}
    run = listed(fast_dir, given_items, **cut, needs={"cpus": 2})

    run.view.poll()
    stage, seen = run.view.stages["items"], []
    for segment in stage.log.segments.values():
        for unit in segment.units:
            spec, read = stage.specs.of(unit), segment.read(unit)[1]
            assert {str(wanted[item["n"]]) for item in read} == {str((spec.needs, spec.priority))}
            assert len({item["g"] for item in read}) == 1 or group_by is None
            assert all(item.keys() == {"n", "g"} for item in read)
            seen += [item["n"] for item in read]
    assert sorted(seen) == list(range(len(drawn)))
    assert [segment.number(at) for at in range(segment.count)] == seen


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ('"wanted":[0,1]', ""),
        ('"wanted":[0]', "it has 1 wants of 2 units"),
        ('"wanted":[0,2]', "it has 2 wants of 2 units"),
        ('"wanted":[0,"1"]', "its wants are not a list"),
        ('"wanted":{}', "it has 0 wants"),
    ],
)
def test_a_header_whose_wants_are_damaged_is_refused(
    change: str, error: str, tmp_path: Path
) -> None:
    run = listed(tmp_path, [{"i": 0}, {"i": 1, "needs": {"gpus": 1}}])
    (path,) = run.paths.stage("items").items.iterdir()
    text = path.read_text()
    assert '"wanted":[0,1]' in text
    path.write_text(text.replace('"wanted":[0,1]', change))

    if error:
        with pytest.raises(RunError, match=error):
            Run.open(run.root).status()
    else:
        assert Run.open(run.root).status().stages["items"].pending == 2
