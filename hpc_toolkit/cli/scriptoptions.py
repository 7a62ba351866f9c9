"""The options of a job script, and the class of every command that renders one.

The name of an option is that of a field of ScriptSpec, or its singular. ``--sbatch NAME[=VALUE]``
sets the fields that repeat other options of sbatch (``slurm.render.grammar.FIELDS``), or passes an
option on. The help
shows the options that people use daily; the others are hidden.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import click

from hpc_toolkit.cli.arguments import argument, complete_cluster, find_cluster
from hpc_toolkit.cli.help import HelpCommand
from hpc_toolkit.errors import ConfigError, RenderError, near_miss
from hpc_toolkit.slurm.render.grammar import FIELDS, PASSED, PASSED_ALONE
from hpc_toolkit.slurm.render.rules import RIVALS
from hpc_toolkit.slurm.render.spec import MAX_RESTARTS, needs_value, read_sbatch, read_spec
from hpc_toolkit.system.options import Option, flag, many, only_given
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.run import Run
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.spec import ScriptSpec
    from hpc_toolkit.system.options import Panels

DEFAULT_TEMPLATE = "work-queue"


def _rare(name: str, help_text: str, metavar: str, *, repeated: bool = False) -> Option:
    return Option(name, help_text, metavar, repeated=repeated, hidden=True)


PANELS: Panels = {
    "Resources": (
        Option("nodes", "Number of nodes. [default: 1]", "N"),
        Option("gpus_per_node", "GPUs on each node: 4 or l40s:4. [default: 0]", "[TYPE:]N"),
        Option("ntasks_per_node", "Ranks on each node. [default: one per GPU]", "N"),
        Option("cpus_per_task", "CPUs of each rank. [default: an equal share]", "N"),
        Option("mem", "Memory of each node: 480G; 0 is all of it.", "SIZE"),
        Option("time", "Time limit, e.g. 4:00:00 or 4h; a plain number is minutes.", "TIME"),
        _rare("gpu_type", "Type of the GPUs. [default: the cluster's]", "TYPE"),
        _rare("isolate_gpus", "Let each rank see only its own GPUs.", ""),
    ),
    "Placement": (
        Option("cluster", "A cluster's name, or a TOML file.", complete=complete_cluster),
        Option("account", "Account to charge."),
        Option("partition", "Comma-separated partitions."),
        Option("qos", "Quality of service."),
    ),
    "Scheduling": (
        Option("array", "Indices of a job array; %8: at most 8 at once.", "0-99%8"),
        Option("dependency", "Jobs to wait for: afterok:JOB, afterany:JOB ..."),
        flag("requeue/no-requeue", "Requeue the job while work remains. [default: on]"),
        _rare("max_restarts", f"Restarts, including Slurm's own. [default: {MAX_RESTARTS}]", "N"),
        _rare("array_offset", "Number added to the array index. [default: 0]", "N"),
    ),
    "Job and its log": (
        Option("job_name", "Name of the job and script. [default: TEMPLATE]"),
        Option("output", "The log. [default: slurm/logs/%x-%j.out]", "PATTERN"),
        many("sbatch", "Any other option of sbatch", "NAME[=VALUE]"),
    ),
    "Training": (
        _rare("run_dir", "Directory for rendezvous and logs. [default: runs/JOB-NAME]", "DIR"),
        _rare("launch", "task-per-node (default) or task-per-gpu.", "FORM"),
        _rare("nproc_per_node", "Ranks on each node. [default: one per GPU]", "N"),
        _rare("rank_restarts", "Restarts of ranks inside a job. [default: 3]", "N"),
        _rare("backend", "nccl or gloo. [default: nccl with GPUs]", "NAME"),
        _rare("stage", "Copy this to each node's disk first.", "PATH", repeated=True),
        _rare("stage_dir", "Directory for copies. [default: $SLURM_TMPDIR or $TMPDIR]", "DIR"),
        _rare("cpu_bind", "CPUs of each task: 'srun --cpu-bind'.", "WHAT"),
        _rare("mem_bind", "NUMA nodes of each task: 'srun --mem-bind'.", "WHAT"),
        _rare("numa_binding", "node: bind each rank to the CPUs near its GPU.", "MODE"),
        _rare("distribution", "Order of the tasks: 'srun --distribution'.", "HOW"),
        _rare("hint", "nomultithread, memory_bound ...: 'srun --hint'.", "WORD"),
    ),
    "Environment": (
        Option("run", "Run directory; the script's argument overrides it.", "DIR"),
        many("module", "Load this module"),
        Option("conda", "Activate this conda environment: name or path."),
        Option("venv", "Use this virtual environment.", "DIR"),
        Option("container", "Run the ranks in this image."),
        many("env", "Export this variable", "NAME=VALUE"),
        many("setup", "Run this command before the work starts", "COMMAND"),
        flag("plain", "Use only srun and torchrun, without hpctk."),
        flag("monitor", "Log the load of each node in the run's directory."),
        _rare("node_cache", "Copy checkpoints to this local disk, e.g. $SLURM_TMPDIR.", "DIR"),
        _rare("idle_exit", "How long a rank waits for work. [default: 10min]", "DURATION"),
        _rare("lease", "Silence after which a rank counts as dead. [default: 3min]", "DURATION"),
        _rare("python", "Interpreter on the nodes. [default: this one]", "FILE"),
        _rare("container_python", "Interpreter in the container.", "FILE"),
        _rare("bind", "Bind a directory.", "FROM[:TO[:ro]]", repeated=True),
        _rare("node_setup", "Run this first, once on each node.", "COMMAND", repeated=True),
        _rare("teardown", "Run this command at the end.", "COMMAND", repeated=True),
    ),
}
"""Every option, by the panel of the help that shows it."""


def script_arguments(more_templates: Sequence[str] = ()) -> dict[str, Any]:
    """The template, and the words that follow two dashes."""

    def complete(incomplete: str) -> list[str]:
        from hpc_toolkit.slurm.render.script import template_names

        names = [*template_names(), *more_templates]
        return [name for name in names if name.startswith(incomplete)]

    kinds = f"work-queue, array, campaign, command, ray or train-... [default: {DEFAULT_TEMPLATE}]"
    program = "Program of the template 'command' or 'ray', or script of 'train-...'."
    return {
        "template": Annotated[str | None, argument("[TEMPLATE]", kinds, complete=complete)],
        "command": Annotated[list[str] | None, argument("[-- COMMAND...]", program)],
    }


class ScriptCommand(HelpCommand):
    """A command that takes what a script is rendered from, beside the options of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; for one of sbatch that is none of ours, name ``--sbatch``."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _moved(error.option_name, words) or error from None

    def invoke(self, ctx: Any) -> Any:
        """Call the function, with the fields that ``--sbatch`` sets beside the other options."""
        if ctx.params["sbatch"]:
            ctx.params |= read_sbatch(ctx.params.pop("sbatch"))
        return super().invoke(ctx)


_REFERENCE = re.compile(r"\$(\{?[A-Za-z_]|\()")
_EXPANDS = re.compile(r"(.*/)?((ba|z|da|k|fi)?sh|awk|perl)")


class _MovedOptionError(ConfigError):
    """An option of sbatch is given without ``--sbatch``."""

    exit_code = 2


def _moved(option: str, words: list[str]) -> ConfigError | None:
    """The error for an option that ``--sbatch`` takes; None for any other unknown option."""

    name = option.removeprefix("--")
    if name not in (*FIELDS, *PASSED, *PASSED_ALONE):
        return None
    after = zip(words, [*words[1:], ""], strict=True)
    word, value = next(pair for pair in after if pair[0].partition("=")[0] == option)
    text = word.removeprefix("--")
    if word == option and needs_value(name):
        text += f"={value or 'VALUE'}"
    hint = f"write --sbatch {shlex.quote(text)}"
    return _MovedOptionError(f"no such option: {option}", hint=hint)


def requested(
    template: str | None, given: dict[str, Any], *, base: dict[str, Any] | None = None
) -> tuple[ScriptSpec, Cluster, str]:
    """The request that the options make, the cluster's facts, and the script.

    ``given`` holds the parameters of a command; None and empty ones count as not given, and are
    taken from ``base``, the fields of another request with ``cluster`` and ``template``. Says on
    stderr how the cluster was found.
    """
    from hpc_toolkit.slurm.render.script import render_script, template_names

    values = _over(base or {}, _fields(given))
    kind = template or values.get("template", DEFAULT_TEMPLATE)
    refuse_run(kind)
    if kind not in template_names():
        # Else the job's name, which is the template's by default, would be blamed.
        msg = f"unknown template: {kind!r}"
        raise RenderError(msg, hint=near_miss(kind, template_names()))
    cluster = find_cluster(values.get("cluster"))
    values = {name: value for name, value in values.items() if name not in ("cluster", "template")}
    if "python" not in values and not values.get("plain"):
        values["python"] = _python(values)
    values.setdefault("job_name", kind)
    spec = read_spec(values)
    if "/" in cluster.argument or cluster.argument.endswith(".toml"):
        # The header names it for renderings from any directory.
        cluster = replace(cluster, argument=os.path.abspath(cluster.argument))
    return spec, cluster, render_script(spec, cluster, kind)


def refuse_run(template: str | None) -> None:
    """Refuse a run in the place of a template, where other commands take it."""
    if template and os.path.isfile(os.path.join(template, "run.json")):
        msg = f"{template} is a run, not a template"
        raise ConfigError(msg, hint=f"name it with --run {template}")


def check_template(template: str | None, run: Run) -> None:
    """Refuse a template that does nothing for a run; None is one that was not named."""
    if run.manifest.campaign is None:
        if template == "campaign":
            message = f"the template campaign needs a campaign, but {run.root} is a list of items"
            raise ConfigError(message, hint="leave the template out")
    elif template is None:
        message = f"{run.root} is a campaign; name the template"
        hint = "the template campaign searches; work-queue only adds workers"
        raise ConfigError(message, hint=hint)
    elif template != "campaign":
        coordinator = f"the coordinator of the campaign {run.root}"
        note(f"{template} only adds workers; {coordinator} must run elsewhere")


def _over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``values`` instead of its own, and without what they exclude."""
    if not base:
        return values

    replaced = {name for rivals in RIVALS if values.keys() & set(rivals) for name in rivals}
    given = values.get("sbatch", ())
    names = {text.partition("=")[0] for text in given}
    kept = [text for text in base.get("sbatch", ()) if text.partition("=")[0] not in names]
    passed = {"sbatch": (*kept, *given)} if kept else {}
    return {**{name: base[name] for name in base if name not in replaced}, **values, **passed}


def _python(values: dict[str, Any]) -> str:
    """The interpreter of a request without ``--python``: its environment's, else this one."""
    conda = values.get("conda") or ""
    home = values.get("venv") or (conda if conda.startswith("/") else "")
    # Not resolved: the link in a virtual environment is what makes Python use the environment.
    return f"{home.rstrip('/')}/bin/python" if home else os.path.abspath(sys.executable)


def _warn_of_literals(values: dict[str, Any]) -> None:
    """Warn of options and arguments with variables, which nothing in the job would expand."""
    command = values.get("command", ())
    expands = bool(command) and _EXPANDS.fullmatch(command[0]) is not None
    kinds = (
        ("--env ", values.get("env", ()), "a file for --setup 'source FILE' sets it in the job"),
        ("--sbatch chdir=", [values.get("chdir", "")], "sbatch itself expands only '%'"),
        ("--output ", [values.get("output", "")], "sbatch itself expands only '%'"),
        ("-- ", () if expands else command, "-- bash -c 'COMMAND' expands it in the job"),
    )
    for where, texts, later in kinds:
        for text in filter(_REFERENCE.search, texts):
            said = f"{where}{shlex.quote(text)}: the variable is not expanded"
            note(f"{said}; double quotes expand it now, and {later}", "warning")


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    values = only_given(given)
    _warn_of_literals(values)
    if "module" in values:
        values["modules"] = values.pop("module")
    if "env" in values:
        values["env"] = tuple(map(read_variable, values["env"]))
    if values.pop("monitor", False):
        values["env"] = (*values.get("env", ()), ("HPCTK_MONITOR", "1"))
    if (cache := values.pop("node_cache", None)) is not None:
        if not cache.startswith(("/", "$")):
            msg = f"--node-cache: {cache!r} is not an absolute path"
            raise ConfigError(msg, hint="name a local disk, or a variable such as '$SLURM_TMPDIR'")
        values["env"] = (*values.get("env", ()), ("HPCTK_NODE_CACHE", cache))
    if "gpus_per_node" in values:
        values |= _gpus(values["gpus_per_node"])
    return values


def _gpus(text: str) -> dict[str, Any]:
    kind, colon, count = text.rpartition(":")
    if not (count.isascii() and count.isdecimal() and len(count) < 10) or (colon and not kind):
        msg = f"--gpus-per-node: {text!r} is not a number of GPUs"
        raise ConfigError(msg, hint="write 4, or l40s:4 to choose the type")
    return {"gpus_per_node": int(count)} | ({"gpu_type": kind} if kind else {})


def read_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        msg = f"--env: {text!r} has no '='"
        raise ConfigError(msg, hint="write NAME=VALUE")
    return name, value
