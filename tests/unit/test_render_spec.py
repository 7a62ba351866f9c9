"""A request is held against what sbatch reads and against what the cluster has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.slurm.clusters.facts import Cluster, load_cluster, parse_cluster
from hpc_toolkit.slurm.clusters.keys import Partition
from hpc_toolkit.slurm.render.directives import complete, directives, forbidden
from hpc_toolkit.slurm.render.spec import ScriptSpec, read_spec

PYTHON = "/opt/python"
GENERIC = load_cluster("generic")
LAB = load_cluster("lab")
KILLARNEY = load_cluster("killarney")


def spec(**fields: Any) -> ScriptSpec:
    return read_spec({"python": PYTHON, **fields})


def options(request: ScriptSpec, cluster: Cluster = GENERIC) -> dict[str, str | None]:
    return dict(directives(complete(request, cluster), cluster))


@pytest.mark.parametrize(
    ("style", "gpus", "expected"),
    [
        ("mem", 2, {"mem": "64G"}),
        ("mem-per-cpu", 2, {"mem-per-cpu": "4G"}),
        ("mem-per-gpu", 2, {"mem-per-gpu": "32G"}),
        ("mem-per-gpu", 0, {"mem-per-cpu": "4G"}),
        ("none", 2, {}),
    ],
)
def test_memory_is_asked_for_in_the_form_of_the_site(
    style: Any, gpus: int, expected: dict[str, str]
) -> None:
    site = Cluster(
        name="s",
        file="s.toml",
        gpus_per_node=4,
        cpus_per_node=32,
        mem_per_node_mib=128 * 1024,
        mem_style=style,
    )

    found = options(spec(gpus_per_node=gpus), site)

    assert {key: value for key, value in found.items() if key.startswith("mem")} == expected


@pytest.mark.parametrize(
    ("time", "canonical", "signal"),
    [
        ("90", "01:30:00", "B:USR1@300"),
        ("1-12", "1-12:00:00", "B:USR1@300"),
        ("5", "00:05:00", "B:USR1@30"),
        ("0:05", "00:00:05", "B:USR1@1"),
    ],
)
def test_time_is_canonical_and_the_warning_fits(time: str, canonical: str, signal: str) -> None:
    found = options(spec(time=time))

    assert (found["time"], found["signal"]) == (canonical, signal)


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"nodes": 9}, r"--nodes: 9 is more than lab has \(clusters/lab.toml: .*nodes = 8\)"),
        ({"gpus_per_node": 5}, r"5 is more than .*clusters/lab.toml: gpus_per_node = 4"),
        ({"ntasks_per_node": 33}, r"33 is more than .*clusters/lab.toml: cpus_per_node = 32"),
        (
            {"ntasks": 5, "nodes": 2, "cpus_per_task": 11},
            r"--ntasks-per-node x --cpus-per-task: 33 is more than .*cpus_per_node = 32",
        ),
        ({"gpus_per_node": 4, "cpus_per_gpu": 9}, r"36 is more than .*cpus_per_node = 32"),
        ({"mem": "200G"}, r"200G is more than .*clusters/lab.toml: mem_per_node = 192000M"),
        ({"mem_per_cpu": "10G", "cpus_per_task": 32}, r"320G is more than .*mem_per_node"),
        ({"mem_per_gpu": "60G", "gpus_per_node": 4}, r"240G is more than .*mem_per_node"),
        ({"time": "3-00:00:01"}, r"3-00:00:01 is more than .*max_walltime = 3-00:00:00"),
        ({"time": "5", "signal": "B:USR1@300"}, "--sbatch signal: 300 s before the end is longer"),
    ],
)
def test_a_request_beyond_the_cluster_is_refused_with_the_limit_and_its_file(
    request_fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RenderError, match=message) as caught:
        options(spec(**request_fields), LAB)

    assert caught.value.hint


@pytest.mark.parametrize("nodes", [0, 10**9, True, "8", None])
def test_absurd_numbers_are_refused(nodes: Any) -> None:
    with pytest.raises(RenderError, match=r"--nodes: .* is not accepted") as caught:
        spec(nodes=nodes)

    assert "from 1 to" in caught.value.hint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus_per_node": -1}, "--gpus-per-node"),
        ({"lease": "10min\n"}, "--lease"),
        ({"idle_exit": "0"}, "--idle-exit"),
        ({"time": "0"}, "--time"),
        ({"mem": "-1G"}, "--mem"),
        ({"mem_per_cpu": "0"}, "--sbatch mem-per-cpu"),
        ({"mem": "1G", "mem_per_cpu": "1G"}, "--mem and --sbatch mem-per-cpu exclude each other"),
        ({"exclusive": 1}, "--sbatch exclusive"),
        ({"job_name": None}, "--job-name"),
        ({"python": "python3"}, "--python"),
        ({"run": "-x"}, "--run"),
        ({"signal": "USR1@60"}, "--sbatch signal"),
        ({"output": "logs/%q.out"}, "--output"),
        ({"env": (("1A", "x"),)}, "--env"),
        ({"env": (("SLURM_JOB_ID", "x"),)}, "--env"),
        ({"setup": ("if",)}, "--setup"),
        ({"setup": ("echo 'a",)}, "--setup"),
        ({"modules": ("a;b",)}, "--module"),
        ({"exclusive": True, "oversubscribe": True}, "--sbatch oversubscribe exclude"),
        ({"isolate_gpus": True, "gpu_bind": "none"}, "sbatch gpu-bind and --isolate-gpus"),
        ({"mem_per_gpu": "1G"}, "--sbatch mem-per-gpu: the job requests no GPU"),
        ({"gres": "GPU:4"}, "--sbatch gres: 'GPU:4' is not accepted"),
        ({"gres": "nvme:1,gpu:l40s:4"}, "--sbatch gres: .* is not accepted"),
        ({"ntasks": 3, "nodes": 4}, "--sbatch ntasks: 3 ranks are fewer than 4 nodes"),
        ({"ntasks": 9, "nodes": 2, "ntasks_per_node": 4}, "ntasks: 9 are more than .* most 8"),
        ({"workers_per_task": 0}, "--workers-per-task: 0"),
        (
            {"cpus_per_task": 4, "workers_per_task": 5},
            "5 workers are more than the 4 CPUs of a rank",
        ),
        ({"one_rank": True, "container": "/x.sif"}, "--one-rank and --container exclude"),
        ({"exclusive": "node"}, "--sbatch exclusive: 'node' is not accepted"),
        ({"sbatch": ("nodes=2",)}, "--sbatch: 'nodes' is not supported"),
        ({"sbatch": ("node=2",)}, "--sbatch: sbatch may read 'node' as 'nodelist'"),
        ({"sbatch": ("N=2",)}, "--sbatch: 'N=2' is not accepted"),
        ({"sbatch": ("--hint=x",)}, "--sbatch: '--hint=x' is not accepted"),
        ({"sbatch": ("hint=a", "hint=b")}, "--sbatch: 'hint' is given twice"),
        ({"sbatch": ("test-only",)}, "--sbatch: 'test-only' is not supported"),
        ({"chdir": "a\\b"}, "--sbatch chdir: .* is not accepted"),
        ({"chdir": "x%j"}, "--sbatch chdir: .* is not accepted"),
        ({"output": "~/x"}, "--output: .* is not accepted"),
        ({"open_mode": "w"}, "--sbatch open-mode: 'w' is not accepted"),
        ({"gpu_bind": "single:0", "gpus_per_node": 1}, "--sbatch gpu-bind: .* is not accepted"),
    ],
)
def test_value_that_no_cluster_accepts_is_refused_with_its_option(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(HpcToolkitError, match=message) as caught:
        spec(**fields)

    assert caught.value.hint


@pytest.mark.parametrize("name", ["HF_TOKEN", "password"])
def test_a_secret_is_refused_since_others_can_read_the_script(name: str) -> None:
    with pytest.raises(RenderError, match=f"{name} looks like a secret") as caught:
        spec(env=((name, "hunter2"),))

    assert "hunter2" not in caught.value.message + caught.value.hint
    assert spec(env=(("TOKENIZERS_PARALLELISM", "false"),)).env


def test_a_long_bad_value_is_shortened_in_the_error() -> None:
    with pytest.raises(RenderError, match=r"\(5002 characters\)") as caught:
        spec(job_name="x" * 5000)

    assert len(caught.value.message) < 200


def test_an_index_beyond_the_largest_array_is_refused() -> None:
    site = Cluster(name="s", file="s.toml", max_array_size=100)

    assert options(spec(array="0-99"), site)["array"] == "0-99"
    for array in ("0-100", "5,200%2"):
        with pytest.raises(RenderError, match=r"than s has \(s\.toml: max_array_size = 100\)"):
            options(spec(array=array), site)


ROUTED_SITE = parse_cluster(
    """
    nodes = 4
    max_walltime = "3:00:00"
    gpus_per_node = 4
    cpus_per_node = 62
    mem_per_node = "500G"
    [[partitions]]
    name = "l40s"
    gpu_type = "l40s"
    [[partitions]]
    name = "h100"
    nodes = 6
    max_walltime = "7-00:00:00"
    gpus_per_node = 8
    gpu_type = "h100"
    cpus_per_node = 46
    mem_per_node = "2000G"
    """,
    file="s.toml",
    name="s",
)
"""A draft of a site that routes jobs: its own limits are those of one of its partitions."""


@pytest.mark.parametrize(
    ("partition", "gpus"), [(None, "h100:8"), ("l40s,h100", "h100:8"), ("elsewhere", "8")]
)
def test_what_another_partition_gives_is_not_refused_by_the_clusters_own_limits(
    partition: str | None, gpus: str
) -> None:
    asked = spec(
        gpus_per_node=8, nodes=6, time="2-0", mem="1800G", cpus_per_task=5, partition=partition
    )

    assert options(asked, ROUTED_SITE)["gpus-per-node"] == gpus


@pytest.mark.parametrize("partition", [None, "large"])
def test_ranks_without_a_number_of_cpus_count_as_one_cpu_each(partition: str | None) -> None:
    site = parse_cluster(
        """
        choose_partition = true
        [[partitions]]
        name = "small"
        cpus_per_node = 32
        [[partitions]]
        name = "large"
        cpus_per_node = 128
        """,
        file="s.toml",
        name="s",
    )

    assert options(spec(ntasks_per_node=64, partition=partition), site)["partition"] == "large"


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ((("mem", 9216),), r"memory per node \(s\.toml: defaults\.mem\): 9G is more than s has"),
        (
            (("cpus_per_task", 9),),
            r"--cpus-per-task \(s\.toml: defaults\.cpus_per_task\): 9 is more than s has",
        ),
    ],
)
def test_a_refusal_names_the_default_that_asks_for_too_much(
    defaults: tuple[tuple[str, str | int], ...], message: str
) -> None:
    site = Cluster(
        name="s", file="s.toml", cpus_per_node=8, mem_per_node_mib=8192, defaults=defaults
    )

    with pytest.raises(RenderError, match=message):
        options(spec(), site)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"ntasks_per_gpu": 2, "gpus_per_node": 2},
            {"ntasks-per-node": "4", "gpu-bind": "single:2"},
        ),
        ({"isolate_gpus": True, "gpus_per_node": 4}, {"gpu-bind": "per_task:1"}),
        (
            {"isolate_gpus": True, "gpus_per_node": 4, "ntasks_per_node": 2},
            {"ntasks-per-node": "2", "gpu-bind": "per_task:2"},
        ),
        ({"ntasks": 8, "nodes": 4}, {"ntasks": "8", "ntasks-per-node": "2"}),
        ({"ntasks": 7, "nodes": 4}, {"ntasks": "7", "ntasks-per-node": None}),
        ({"gres": "nvme:1", "gpus_per_node": 2}, {"gpus-per-node": "2", "gres": "nvme:1"}),
        ({"gpu_type": "a100", "gpus_per_node": 2}, {"gpus-per-node": "a100:2"}),
        ({"cpus_per_gpu": 8, "gpus_per_node": 2}, {"cpus-per-gpu": "8", "cpus-per-task": None}),
        ({"exclusive": "user"}, {"exclusive": "user"}),
        ({"sbatch": ("hint=nomultithread",)}, {"hint": "nomultithread"}),
    ],
)
def test_options_that_depend_on_each_other_become_these_directives(
    fields: dict[str, Any], expected: dict[str, str | None]
) -> None:
    found = options(spec(**fields))

    assert {name: found.get(name) for name in expected} == expected


def test_the_chosen_partition_gives_the_shares_and_is_asked_for() -> None:
    site = Cluster(
        name="s",
        file="s.toml",
        choose_partition=True,
        partitions=(
            Partition(name="small", max_walltime_s=3600, gpus_per_node=2, cpus_per_node=16),
            Partition(name="large", max_walltime_s=86400, gpus_per_node=4, cpus_per_node=64),
        ),
    )

    short, long = (options(spec(gpus_per_node=2, time=time), site) for time in ("60", "120"))

    assert (short["partition"], short["cpus-per-task"]) == ("small", "8")
    assert (long["partition"], long["cpus-per-task"]) == ("large", "16")


@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        ("/home/me/x", r"killarney takes no jobs from below ~ \(clusters/killarney.toml: forb"),
        ("/scratch/a%jb", "Slurm does not take '%j' literally"),
        ("/scratch/a\\b", "in the directory of a log"),
        ("/scratch/it's 50% done", None),
    ],
)
def test_forbidden_says_why_no_job_should_be_submitted_from_there(
    directory: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    found = forbidden(KILLARNEY, Path(directory))

    assert found is None if reason is None else re.search(reason, found or "")
