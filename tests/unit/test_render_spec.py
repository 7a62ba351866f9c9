"""A request is held against what sbatch reads and against what the cluster has."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_toolkit.clusters import Cluster, Partition, load_cluster
from hpc_toolkit.directives import complete, directives
from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.scriptspec import ScriptSpec, command_line, spec_json

PYTHON = "/opt/python"
GENERIC = load_cluster("generic")
LAB = load_cluster("lab")
KILLARNEY = load_cluster("killarney")


def spec(**fields: Any) -> ScriptSpec:
    return ScriptSpec(**{"python": PYTHON, **fields})


def options(request: ScriptSpec, cluster: Cluster = GENERIC) -> dict[str, str | None]:
    return dict(directives(complete(request, cluster), cluster))


def test_directives_of_the_shortest_request_state_everything_a_site_may_default() -> None:
    found = options(spec(nodes=8, gpus_per_node=4))

    assert found == {
        "job-name": "work-queue",
        "nodes": "8",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "cpus-per-task": "4",
        "mem-per-cpu": "4G",
        "time": "01:00:00",
        "signal": "B:USR1@300",
        "requeue": None,
        "no-kill": None,
        "open-mode": "append",
        "output": "slurm/logs/%x-%j.out",
    }


def test_directives_of_a_known_node_take_the_share_of_the_gpus() -> None:
    whole, half = (options(spec(gpus_per_node=n), LAB) for n in (4, 2))

    assert (whole["cpus-per-task"], whole["mem"]) == ("8", "192000M")
    assert (half["cpus-per-task"], half["mem"]) == ("8", "96000M")
    assert half["gpus-per-node"] == "l40s:2"


def test_directives_without_gpus_take_the_share_of_the_cpus() -> None:
    found = options(spec(ntasks_per_node=4, cpus_per_task=2), LAB)

    assert found["mem"] == "48000M"
    assert "gpus-per-node" not in found


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("gpus-per-node", ("gpus-per-node", "a100:4")),
        ("gres", ("gres", "gpu:a100:4")),
        ("gpus-per-task", ("gpus-per-task", "a100:2")),
    ],
)
def test_gpus_are_asked_for_in_the_one_form_of_the_site(
    form: Any, expected: tuple[str, str]
) -> None:
    site = Cluster(name="s", file="s.toml", gpu_type="a100", gpu_request=form)

    found = directives(complete(spec(gpus_per_node=4, ntasks_per_node=2), site), site)

    assert [option for option in found if "gpu" in option[0] or option[0] == "gres"] == [expected]


def test_gpus_per_task_that_do_not_divide_are_refused() -> None:
    site = Cluster(name="s", file="s.toml", gpu_request="gpus-per-task")

    with pytest.raises(RenderError, match="4 GPUs cannot be shared evenly by 3 ranks"):
        options(spec(gpus_per_node=4, ntasks_per_node=3), site)


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


def test_a_given_memory_option_replaces_the_sites_default() -> None:
    found = options(spec(mem="0"))

    assert found["mem"] == "0"
    assert "mem-per-cpu" not in found


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
        ({"nodes": 9}, r"--nodes: 9 is more than lab has \(clusters/lab.toml: nodes = 8\)"),
        ({"gpus_per_node": 5}, r"5 is more than .*clusters/lab.toml: gpus_per_node = 4"),
        ({"ntasks_per_node": 33}, r"33 is more than .*clusters/lab.toml: cpus_per_node = 32"),
        ({"mem": "200G"}, r"200G is more than .*clusters/lab.toml: mem_per_node = 192000M"),
        ({"mem_per_cpu": "10G", "cpus_per_task": 32}, r"320G is more than .*mem_per_node"),
        ({"mem_per_gpu": "60G", "gpus_per_node": 4}, r"240G is more than .*mem_per_node"),
        ({"time": "3-00:00:01"}, r"3-00:00:01 is more than .*max_walltime = 3-00:00:00"),
        ({"mem_per_gpu": "1G"}, "--mem-per-gpu: the job asks for no GPU"),
        ({"time": "5", "signal": "B:USR1@300"}, "--signal: 300 s before the end do not fit"),
    ],
)
def test_a_request_beyond_the_cluster_is_refused_with_the_limit_and_its_file(
    request_fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RenderError, match=message) as caught:
        options(spec(**request_fields), LAB)

    assert caught.value.hint


def test_gpus_on_a_site_without_any_are_refused() -> None:
    site = Cluster(name="s", file="s.toml", gpus_per_node=0)

    with pytest.raises(RenderError, match=r"1 is more than s has \(s.toml: gpus_per_node = 0\)"):
        options(spec(gpus_per_node=1), site)


def test_a_missing_account_is_refused_where_the_site_needs_one() -> None:
    with pytest.raises(RenderError, match=r"account_required = true") as caught:
        options(spec(nodes=1), KILLARNEY)

    assert caught.value.hint.startswith("--account aip-")


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"nodes": 43, "time": "2-0"}, "gpubase_l40s_b4 3-00:00:00 on 42 nodes"),
        ({"time": "4:00:00", "partition": "gpubase_l40s_b1"}, "gpubase_l40s_b1 03:00:00"),
    ],
)
def test_a_job_that_no_partition_would_ever_start_is_refused(
    fields: dict[str, Any], limit: str
) -> None:
    with pytest.raises(RenderError, match=f"no partition of killarney gives .*{limit}"):
        options(spec(account="aip-x", **fields), KILLARNEY)


def test_a_partition_that_the_file_does_not_know_is_left_to_slurm() -> None:
    found = options(spec(account="aip-x", partition="new", nodes=100, time="2-0"), KILLARNEY)

    assert found["partition"] == "new"


def test_a_partition_without_a_known_size_takes_any_number_of_nodes() -> None:
    site = Cluster(
        name="s", file="s.toml", partitions=(Partition(name="long", max_walltime_s=86400),)
    )

    assert options(spec(nodes=500, time="20:00:00"), site)["nodes"] == "500"


def test_a_bad_default_of_a_site_is_refused_with_its_file() -> None:
    site = Cluster(name="s", file="s.toml", defaults=(("constraint", "a b"),))

    with pytest.raises(RenderError, match=r"s\.toml: defaults: --constraint: 'a b'"):
        options(spec(), site)


def test_bad_setup_of_a_site_is_refused_with_its_file() -> None:
    site = Cluster(name="s", file="s.toml", setup=("echo $HOME",))

    with pytest.raises(RenderError, match=r"s\.toml: --setup: 'echo \$HOME'"):
        options(spec(), site)


@pytest.mark.parametrize("nodes", [0, -1, 10**9, 1.0, True, "8", None])
def test_absurd_numbers_are_refused(nodes: Any) -> None:
    with pytest.raises(RenderError, match=r"--nodes: .* is not accepted") as caught:
        spec(nodes=nodes)

    assert "from 1 to" in caught.value.hint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus_per_node": -1}, "--gpus-per-node"),
        ({"ntasks_per_node": 0}, "--ntasks-per-node"),
        ({"cpus_per_task": 10**9}, "--cpus-per-task"),
        ({"max_restarts": -1}, "--max-restarts"),
        ({"time": "0"}, "--time"),
        ({"time": "nan"}, "--time"),
        ({"mem": "-1G"}, "--mem"),
        ({"mem_per_cpu": "0"}, "--mem-per-cpu"),
        ({"mem": "1G", "mem_per_cpu": "1G"}, "--mem and --mem-per-cpu exclude each other"),
        ({"exclusive": 1}, "--exclusive"),
        ({"job_name": None}, "--job-name"),
        ({"python": "python3"}, "--python"),
        ({"run": "-x"}, "--run"),
        ({"signal": "USR1@60"}, "--signal"),
        ({"output": "logs/"}, "--output"),
        ({"output": "logs/%q.out"}, "--output"),
        ({"env": (("1A", "x"),)}, "--env"),
        ({"env": (("SLURM_JOB_ID", "x"),)}, "--env"),
        ({"env": (("IFS", "x"),)}, "--env"),
        ({"setup": ("if",)}, "--setup"),
        ({"setup": ("echo 'a",)}, "--setup"),
        ({"setup": ("-x",)}, "--setup"),
        ({"setup": ("",)}, "--setup"),
        ({"modules": ("a;b",)}, "--module"),
    ],
)
def test_value_that_no_cluster_accepts_is_refused_with_its_option(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(HpcToolkitError, match=message) as caught:
        spec(**fields)

    assert caught.value.hint


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "password", "MY_SECRET"])
def test_a_secret_is_refused_since_others_can_read_the_script(name: str) -> None:
    with pytest.raises(RenderError, match=f"{name} looks like a secret") as caught:
        spec(env=((name, "hunter2"),))

    assert "hunter2" not in caught.value.message + caught.value.hint


def test_a_variable_with_token_inside_its_name_is_no_secret() -> None:
    assert spec(env=(("TOKENIZERS_PARALLELISM", "false"),)).env


def test_a_long_bad_value_is_shortened_in_the_error() -> None:
    with pytest.raises(RenderError, match=r"\(5002 characters\)") as caught:
        spec(job_name="x" * 5000)

    assert len(caught.value.message) < 200


def test_command_line_names_what_differs_from_the_default() -> None:
    request = spec(nodes=2, requeue=False, exclusive=True, env=(("A", "b c"),), setup=("a b",))

    line = command_line(request, template="work-queue", cluster="lab")

    assert line == (
        "hpctk render work-queue --cluster lab --nodes 2 --exclusive --no-requeue"
        " --python /opt/python --setup 'a b' --env 'A=b c'"
    )


def test_spec_json_is_one_ascii_line() -> None:
    line = spec_json(spec(run="läufe/日本"), template="work-queue", cluster="lab")

    assert line.isascii()
    assert "\n" not in line
