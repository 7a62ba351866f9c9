"""Scripts with nothing of hpctk in them: srun, torchrun, and the program."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.render.rules import asked, option

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpc_toolkit.slurm.render.directives import Directive
    from hpc_toolkit.slurm.render.spec import ScriptSpec

TEMPLATES = ("command", "train-cpu", "train-single-gpu", "train-multi-gpu", "train-multi-node")
"""The templates of which there are plain scripts."""

_NEED_HPCTK = (
    *("signal", "max_restarts", "launch", "rank_restarts", "backend", "run_dir", "numa_binding"),
    *("stage", "stage_dir", "container", "node_setup", "teardown", "array_offset"),
)


def check_plain(spec: ScriptSpec, template: str) -> None:
    """Raise RenderError for a plain script that would need hpctk on the nodes."""
    if template not in TEMPLATES:
        msg = f"--plain: the template {template} needs hpctk on the nodes"
        raise RenderError(msg, hint=f"leave it out, or render one of {', '.join(TEMPLATES)}")
    given = asked(spec)
    for name in _NEED_HPCTK:
        if name in given:
            msg = f"{option(name)}: a plain script has nothing that would do it"
            raise RenderError(msg, hint="leave it out, or leave out --plain")


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
