"""A request is held against sbatch and the cluster; scripts are signed, and examples are golden."""

from __future__ import annotations

import difflib
import importlib.util
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.slurm.clusters.facts import Cluster, load_cluster
from hpc_toolkit.slurm.render import script as render_module
from hpc_toolkit.slurm.render.directives import complete, directives, forbidden
from hpc_toolkit.slurm.render.file import origin
from hpc_toolkit.slurm.render.kinds import PLAIN
from hpc_toolkit.slurm.render.script import render_script, template_names
from hpc_toolkit.slurm.render.spec import OPTIONS, PROGRAMS, ScriptSpec, option, read_spec
from tests.scripttext import batch_program, shellcheck

PYTHON = "/opt/python"
GENERIC = load_cluster("generic")
LAB = load_cluster("lab")
KILLARNEY = load_cluster("killarney")


def spec(**fields: Any) -> ScriptSpec:
    return read_spec({"python": PYTHON, **fields})


def options(request: ScriptSpec, cluster: Cluster = GENERIC) -> dict[str, str | None]:
    return dict(directives(complete(request, cluster), cluster))


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
        ({"cpus_per_task": 4, "workers_per_task": 5}, "5 workers are more than the 4 CPUs"),
        ({"one_rank": True, "container": "/x.sif"}, "--one-rank and --container exclude"),
        ({"exclusive": "node"}, "--sbatch exclusive: 'node' is not accepted"),
        ({"sbatch": ("nodes=2",)}, "--sbatch: 'nodes' is not supported"),
        ({"sbatch": ("--hint=x",)}, "--sbatch: '--hint=x' is not accepted"),
        ({"sbatch": ("hint=a", "hint=b")}, "--sbatch: 'hint' is given twice"),
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


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ((("mem", 9216),), r"memory per node \(s\.toml: defaults\.mem\): 9G is more than s has"),
        (
            (("cpus_per_task", 9),),
            r"--cpus-per-task \(s\.toml: defaults\.cpus_per_task\): 9 is ",
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


@pytest.mark.parametrize("name", ["base", "training", "../base", "", "a\nb"])
def test_only_complete_templates_can_be_rendered(name: str) -> None:
    with pytest.raises(RenderError, match="unknown template"):
        render_script(spec(), GENERIC, name)


def test_a_cluster_given_by_path_is_in_the_command_and_not_in_the_hash() -> None:
    here, there = (replace(GENERIC, argument=f"/{place}/generic.toml") for place in ("a", "b"))

    first, second = (render_script(spec(), site) for site in (here, there))

    def facts(script: str) -> str:
        return next(line for line in script.splitlines() if line.startswith("# hpctk-cluster"))

    assert "--cluster /a/generic.toml" in first
    assert facts(first) == facts(second)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text, "rendered"),
        (lambda text: text.replace("--nodes=1", "--nodes=2"), "edited"),
        (lambda text: text + "\n", "edited"),
        (lambda text: text.replace("#   hpctk render", "#   render"), "edited"),
        (lambda text: text + text[text.index("# hpctk-body") :].splitlines()[0] + "\n", "edited"),
        (lambda _: "#!/bin/bash\necho mine\n", "foreign"),
        (lambda _: "", "foreign"),
    ],
)
def test_origin_tells_an_edited_script_from_a_rendered_one(change: Any, expected: str) -> None:
    assert origin(change(render_script(spec(), GENERIC))) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ value }}", "written into the script without a filter"),
        ("{{ value ~ 'x' }}", "written into the script without a filter"),
        ("{{ true }}", "written into the script without a filter"),
        ("{{ value|text }}", "would not stay on one line"),
        ("{{ ('name', value)|directive }}", "--name: .* cannot be part of an sbatch directive"),
    ],
)
def test_a_template_cannot_write_a_value_unmarked(template: str, message: str) -> None:
    environment = render_module._environment()

    with pytest.raises(RenderError, match=message):
        environment.from_string(template).render(value="a\n#SBATCH --evil")


@pytest.mark.parametrize("name", ["base", *template_names()])
def test_template_is_short_and_does_no_arithmetic(name: str) -> None:
    source = render_module._source(f"{name}.sbatch.j2")

    assert len(source.splitlines()) <= 52
    assert not [
        value
        for _, kind, value in render_module._environment().lex(source)
        if kind == "operator" and value in {"+", "-", "*", "/", "//", "**"}
    ]


SCRIPT = ("train.py", "--lr", "1")
TWO_NODES: dict[str, Any] = {"nodes": 2, "gpus_per_node": 4}
TASK_PER_GPU = {"launch": "task-per-gpu"}


def script(template: str = "train-multi-node", cluster: Any = LAB, **fields: Any) -> str:
    given = {"python": "/p/python", "command": SCRIPT, "job_name": "job", **fields}
    return render_script(read_spec(given), cluster, template)


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"gpus_per_node": 4}, "nccl"),
        ({"gpus_per_node": 4, "backend": "gloo"}, "gloo"),
        ({}, "gloo"),
    ],
)
def test_gpus_are_joined_by_nccl_and_cpus_by_gloo(fields: dict[str, Any], backend: str) -> None:
    text = script(cluster=GENERIC, nodes=2, **fields)

    assert f"--backend={backend} " in shlex.join(batch_program(text))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"template": "train-cpu", "command": ()},
            "the template train-cpu needs a training script",
        ),
        ({"template": "train-cpu", "nodes": 2}, "--nodes: the template train-cpu runs on one node"),
        ({"template": "train-single-gpu", "gpus_per_node": 2}, "train-single-gpu uses one"),
        ({"template": "train-multi-gpu"}, "the template train-multi-gpu needs --gpus-per-node"),
        ({"backend": "nccl"}, "--backend: nccl needs GPUs"),
        ({"gpus_per_node": 2, "nproc_per_node": 4}, "-node: nccl cannot join 4 ranks on 2 GPUs"),
        ({**TASK_PER_GPU, "rank_restarts": 1}, "--rank-restarts: with --launch task-per-gpu"),
        (
            {"command": (*SCRIPT, "--nproc_per_node=8")},
            "--nproc_per_node=8 comes after the script, which would get it",
        ),
        ({"command": ("python3.11", "train.py")}, "starts the script itself, without 'python3.11'"),
        ({"numa_binding": "node"}, "--numa-binding: a node's GPUs (0)"),
        (
            {**TASK_PER_GPU, "gpus_per_node": 2, "numa_binding": "node"},
            "--numa-binding: with --launch task-per-gpu, srun binds the ranks",
        ),
        ({"stage_dir": "/x"}, "--stage-dir needs --stage"),
        *(({"stage": (path,)}, "--stage: ") for path in ("/", "a/..", ".users", "-x")),
        ({"template": "command", "command": ("-m", "train")}, "cannot start the module train"),
        ({"template": "train-cpu", "command": ("-m",)}, "'-m' is not accepted"),
        ({"template": "train-cpu", "command": ("-c", "train")}, "'-c' is not accepted"),
        ({"cpu_bind": "cores", "hint": "multithread"}, "--cpu-bind and --hint exclude each other"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RenderError) as caught:
        script(cluster=GENERIC, **fields)

    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("template", "fields", "starts"),
    [
        ("command", {}, "srun --kill-on-bad-exit=1 --cpus-per-task=$SLURM_CPUS_PER_TASK run"),
        ("train-cpu", {}, "srun --kill-on-bad-exit=1 --cpus-per-task=$SLURM_CPUS_PER_TASK"),
        ("train-single-gpu", {}, "srun "),
        ("train-multi-gpu", {"gpus_per_node": 4}, "srun "),
        ("train-multi-node", TWO_NODES, "srun "),
    ],
)
def test_a_plain_script_has_nothing_of_hpctk(
    template: str, fields: dict[str, Any], starts: str
) -> None:
    command = ("run", "--lr", "1") if template == "command" else SCRIPT
    text = script(template, plain=True, python=None, command=command, **fields)

    lines = text.splitlines()
    assert len(lines) <= 40
    assert not [line for line in lines if "hpctk" in line and not line.startswith("#")]
    assert not [line for line in lines if "hpc_toolkit" in line]
    assert "#SBATCH --signal" not in text, "nothing would handle it"
    (step,) = [at for at, line in enumerate(lines) if line.startswith("srun ")]
    words = shlex.split("\n".join(lines[step:]))
    assert shlex.join(words).replace("'", "").startswith(starts)
    assert words[-len(command) - 1 :] == [*command, "$@"]
    assert ("torchrun" in words) == (template in ("train-multi-gpu", "train-multi-node"))
    assert ("--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT" in words) == (fields is TWO_NODES)


EXAMPLES = Path(__file__).parents[2] / "slurm" / "examples"


def _load() -> ModuleType:
    specification = importlib.util.spec_from_file_location("examples", EXAMPLES / "render.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


RENDERED: dict[str, str] = _load().rendered()


@pytest.mark.parametrize("name", RENDERED)
def test_example_equals_its_rendering(name: str) -> None:
    committed = (EXAMPLES / name).read_bytes().decode()

    lines = (committed.splitlines(), RENDERED[name].splitlines())
    difference = "\n".join(difflib.unified_diff(*lines, lineterm=""))
    assert committed == RENDERED[name], f"{difference}\nIf this is intended: make golden"
    assert origin(committed) == "rendered"
    assert {path.name for path in EXAMPLES.glob("*.sbatch")} == RENDERED.keys()


def test_the_length_that_the_readme_gives_is_that_of_the_examples() -> None:
    readme = (EXAMPLES.parents[1] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"of (\d+) to (\d+) lines\s+that you can read and edit", readme)
    lines = {name: len(text.splitlines()) for name, text in RENDERED.items()}
    del lines["every-option.sbatch"]  # nobody needs all options at once

    assert found is not None
    assert int(found[1]) <= min(lines.values()) < max(lines.values()) <= int(found[2])
    assert "Edit freely" in RENDERED["eight-nodes.sbatch"]


def test_examples_are_clean_for_shellcheck() -> None:
    shellcheck(EXAMPLES / name for name in RENDERED)


def test_examples_show_every_option_and_every_template() -> None:
    examples = _load().EXAMPLES.values()

    shown = {name for _, _, request in examples for name in request}
    assert {field.name for field in fields(ScriptSpec)} - shown == {"job_name"}
    assert {template for _, template, _ in examples} == set(template_names())


def test_every_template_refuses_the_options_that_it_does_not_use() -> None:
    values = {name: one for _, _, given in _load().EXAMPLES.values() for name, one in given.items()}
    reasons = set()
    for name, row in OPTIONS.items():
        needed = row.needs.partition(" ")[0]
        given = {one: values[one] for one in (name, needed) if one in values}
        unused = set(template_names()) - set(row.templates)
        without_hpctk = [] if row.plain else [one for one in row.templates if one in PLAIN]
        for template in (*unused, *without_hpctk):
            program = {"command": ("train.py",)} if template in PROGRAMS else {}
            plain = {"plain": True} if template in without_hpctk else {"python": "/p/python"}
            spec = read_spec({**program, **plain, **given})
            with pytest.raises(RenderError, match=f"^({option(name)}|{option(needed)}): ") as no:
                render_script(spec, load_cluster("generic"), template)
            reasons.add(no.value.message.partition(": ")[2].replace(template, "TEMPLATE"))

    assert reasons == {"not used by the template TEMPLATE", "not supported by plain scripts"}
