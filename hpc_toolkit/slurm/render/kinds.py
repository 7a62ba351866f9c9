"""The templates by what they start, the options that each accepts, and plain scripts."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.render.rules import asked, option
from hpc_toolkit.system.options import launcher_option

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpc_toolkit.slurm.render.directives import Directive
    from hpc_toolkit.slurm.render.spec import ScriptSpec

TRAININGS = ("train-cpu", "train-single-gpu", "train-multi-gpu", "train-multi-node")
"""Templates that start the ranks of a training script."""

RAY = "ray"
"""The template that starts a Ray cluster and runs its driver."""

QUEUES = ("work-queue", "array", "campaign")
"""Templates that start workers on a run."""

PROGRAMS = ("command", RAY, *TRAININGS)
"""Templates that start a user's program instead of workers on a run."""

ARRAYS = ("array", "command")
"""Templates that can be job arrays."""

_OF_QUEUES = ("run", "idle_exit", "lease")
_OF_TRAININGS = (
    *("launch", "run_dir", "nproc_per_node", "rank_restarts", "backend", "stage", "stage_dir"),
    *("cpu_bind", "mem_bind", "numa_binding", "distribution", "hint"),
)
_TASKS = ("ntasks", "ntasks_per_node", "ntasks_per_gpu", "isolate_gpus", "gpu_bind")
_ALONE = ("launch", "nproc_per_node")
_NOT_FOR = {
    "train-cpu": (*_ALONE, "rank_restarts", "backend", "gpus_per_node", "numa_binding"),
    "train-single-gpu": _ALONE,
}
_STARTERS = re.compile(r"(.*/)?(python[0-9.]*|torchrun|accelerate|srun|mpirun)")
_EXAMPLE = {
    "command": "hpctk render command --nodes 2 -- python train.py",
    RAY: "hpctk render ray --nodes 2 -- hpctk work RUN --engine ray --workers 8",
    "train-cpu": "hpctk render train-cpu -- trees.py --depth 6",
    "train-single-gpu": "hpctk render train-single-gpu -- train.py --lr 1",
    "train-multi-gpu": "hpctk render train-multi-gpu --gpus-per-node 4 -- train.py --lr 1",
    "train-multi-node": "hpctk render train-multi-node --nodes 2 --gpus-per-node 4 -- train.py",
}
TEMPLATES = ("command", "train-cpu", "train-single-gpu", "train-multi-gpu", "train-multi-node")
"""The templates of which there are plain scripts."""

_NEED_HPCTK = (
    *("signal", "max_restarts", "launch", "rank_restarts", "backend", "run_dir", "numa_binding"),
    *("stage", "stage_dir", "container", "node_setup", "teardown", "array_offset"),
)


def check_template(spec: ScriptSpec, template: str) -> None:
    """Raise RenderError for options that the template ignores, and for missing required ones."""
    given = asked(spec)
    if spec.plain:
        _check_plain(template, given)
    elif spec.python is None:
        msg = "--python: the interpreter on the nodes is unknown"
        raise RenderError(msg, hint="give the absolute path of a Python with hpc_toolkit")
    if template in PROGRAMS:
        _check_program(spec, template, given)
    elif spec.command:
        msg = f"the template {template} cannot run {spec.command[0]!r}"
        raise RenderError(msg, hint="use the template command for other programs")
    if template == RAY:
        why = "the template ray starts one task per node; Ray assigns CPUs and GPUs"
        _refuse(given, (*_TASKS, "container"), why)
    if template in TRAININGS:
        _check_training(spec, template, given)
    else:
        why = f"not used by the template {template}"
        _refuse(given, _OF_TRAININGS, why, "leave it out, or render a train-... template")
    _check_container(spec, template)
    _check_array(spec, template)


def _check_array(spec: ScriptSpec, template: str) -> None:
    if template == "array" and spec.array is None:
        msg = "the template array needs --array"
        raise RenderError(msg, hint="such as --array 0-99, or 0-99%10 for ten at a time")
    if spec.array_offset and spec.array is None:
        msg = "--array-offset: the job is not an array"
        raise RenderError(msg, hint="add --array 0-99, or leave it out")
    if spec.array is not None and template not in ARRAYS:
        msg = f"--array: not supported by the template {template}"
        raise RenderError(msg, hint="use the template array or command")


def _check_container(spec: ScriptSpec, template: str) -> None:
    """The container of a command holds the program alone; any other one holds hpctk as well."""
    inside = spec.container_python is not None
    if inside and (spec.container is None or template == "command"):
        msg = "--container-python: hpctk does not run in a container here"
        raise RenderError(msg, hint="leave it out")
    if spec.container is not None and not inside and template != "command":
        msg = "--container: the interpreter in the container is unknown"
        raise RenderError(msg, hint="give its path: --container-python /usr/bin/python3")


def _check_program(spec: ScriptSpec, template: str, given: dict[str, Any]) -> None:
    if not spec.command:
        what = "a program" if template not in TRAININGS else "a training script"
        msg = f"the template {template} needs {what}"
        raise RenderError(msg, hint=f"write it after --: {_EXAMPLE.get(template, '-- PROGRAM')}")
    if spec.command[0] == "-m" and template not in TRAININGS:
        msg = f"the template {template} cannot start the module {spec.command[1]}"
        raise RenderError(msg, hint=f"add the interpreter: python -m {spec.command[1]}")
    why = f"not used by the template {template}"
    hint = "leave it out, or pass it as an argument of the program"
    _refuse(given, _OF_QUEUES, why, hint)


def _check_training(spec: ScriptSpec, template: str, given: dict[str, Any]) -> None:
    _refuse(given, _TASKS, "not used by trainings, whose ranks see all GPUs of their node")
    more = "train-multi-gpu" if template == "train-single-gpu" else "train-multi-node"
    hint = f"leave it out, or render {more}"
    _refuse(given, _NOT_FOR.get(template, ()), f"{template} runs one process", hint)
    if template != "train-multi-node" and spec.nodes > 1:
        msg = f"--nodes: the template {template} runs on one node"
        raise RenderError(msg, hint="use the template train-multi-node")
    if template == "train-single-gpu" and spec.gpus_per_node > 1:
        msg = f"--gpus-per-node: train-single-gpu uses one GPU, not {spec.gpus_per_node}"
        raise RenderError(msg, hint="use the template train-multi-gpu")
    if template == "train-multi-gpu" and not spec.gpus_per_node:
        msg = "the template train-multi-gpu needs --gpus-per-node"
        raise RenderError(msg, hint=f"such as: {_EXAMPLE[template]}")
    if spec.launch == "task-per-gpu" and spec.rank_restarts is not None:
        msg = "--rank-restarts: with --launch task-per-gpu no launcher restarts ranks"
        raise RenderError(msg, hint="leave it out, or leave out --launch")
    word = launcher_option(spec.command[1:])
    if word is not None and template != "train-cpu":  # which has no launcher
        msg = f"{word} comes after the script, which would get it"
        raise RenderError(msg, hint="write it before --, as in: --nproc-per-node 4 -- train.py")
    starter = spec.command[0]
    if _STARTERS.fullmatch(starter):
        msg = f"the template {template} starts the script itself, without {starter!r}"
        raise RenderError(msg, hint=f"write only the script after --: {_EXAMPLE[template]}")


def _refuse(
    given: dict[str, Any], names: tuple[str, ...], why: str, hint: str = "leave it out"
) -> None:
    for name in names:
        if name in given:
            msg = f"{option(name)}: {why}"
            raise RenderError(msg, hint=hint)


def _check_plain(template: str, given: dict[str, Any]) -> None:
    if template not in TEMPLATES:
        msg = f"--plain: the template {template} needs hpctk on the nodes"
        raise RenderError(msg, hint=f"leave it out, or render one of {', '.join(TEMPLATES)}")
    why = "not supported by plain scripts"
    _refuse(given, _NEED_HPCTK, why, "leave it out, or leave out --plain")


def plain_words(
    full: ScriptSpec, directives: list[Directive], template: str, options: Iterable[str]
) -> list[str]:
    """The step's command, each word quoted for bash; the script's own arguments follow."""
    words = ["srun", "--kill-on-bad-exit=1"]
    if "cpus-per-task" in {name for name, _ in directives}:
        # From 22.05 to 23.02 srun ignores SLURM_CPUS_PER_TASK.
        words.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    bound = (one for one in options if one.startswith("--srun="))
    words += [shlex.quote(one.removeprefix("--srun=")) for one in bound]
    words += _starter(full, template)
    return [*words, *map(shlex.quote, full.command)]


def _starter(full: ScriptSpec, template: str) -> list[str]:
    """What starts the program: nothing, Python, or torchrun."""
    if template == "command":
        return []
    python = shlex.quote(full.python) if full.python else "python"
    if template in ("train-cpu", "train-single-gpu"):
        return [python]
    torchrun = [python, "-m", "torch.distributed.run"] if full.python else ["torchrun"]
    torchrun.append(f"--nproc-per-node={full.nproc_per_node}")
    if template == "train-multi-gpu":
        return [*torchrun, "--standalone"]
    return [
        *torchrun,
        *('--nnodes="$SLURM_JOB_NUM_NODES"', '--rdzv-id="$SLURM_JOB_ID"', "--rdzv-backend=c10d"),
        '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"',
    ]
