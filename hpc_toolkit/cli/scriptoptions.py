"""The options of a job script, and the class of every command that renders one.

The name of an option is that of a field of ScriptSpec, or its singular. ``--sbatch NAME[=VALUE]``
sets the fields that repeat other options of sbatch (``slurm.render.spec.FIELDS``), or passes an
option on. The help shows the options that people use daily; the others are hidden.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import click

from hpc_toolkit.cli.arguments import Argument, complete_cluster, find_cluster
from hpc_toolkit.cli.help import ALL, HelpCommand, write_rows
from hpc_toolkit.errors import ConfigError, RenderError, near_miss
from hpc_toolkit.slurm.render.spec import (
    DEFAULTS,
    FIELDS,
    OPTIONS,
    Row,
    ScriptSpec,
    option,
    read_spec,
    rivals_of,
)
from hpc_toolkit.slurm.render.values import PASSED, PASSED_ALONE, left_out
from hpc_toolkit.system.options import Option, Panels, flag, only_given
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.run import Run
    from hpc_toolkit.slurm.clusters.facts import Cluster

DEFAULT_TEMPLATE = "work-queue"


_DAILY: dict[str, tuple[str | Option, ...]] = {
    "Resources": ("nodes", "gpus_per_node", "ntasks_per_node", "cpus_per_task", "mem", "time"),
    "Placement": (
        Option("cluster", "A cluster's name, or a TOML file.", complete=complete_cluster),
        *("account", "partition", "qos"),
    ),
    "Scheduling": ("array", "dependency", "requeue"),
    "Job and its log": ("job_name", "output", "sbatch"),
    "Training": (),
    "Environment": (
        *("run", "modules", "conda", "venv", "container", "env", "setup", "plain"),
        flag("monitor", "Log the load of each node in the run's directory."),
    ),
}
"""The options that the help shows, in its order, and those without a field."""


def _panels() -> Panels:
    rows = {name: row for name, row in OPTIONS.items() if row.panel}
    panels = {
        panel: [one if isinstance(one, Option) else _option(one, rows.pop(one)) for one in daily]
        for panel, daily in _DAILY.items()
    }
    for name, row in rows.items():
        if row.panel in panels:
            panels[row.panel].append(_option(name, row, hidden=True))
    return {panel: tuple(options) for panel, options in panels.items()}


def _option(name: str, row: Row, *, hidden: bool = False) -> Option:
    default = DEFAULTS[name]
    spelled = option(name).removeprefix("--").replace("-", "_")
    return Option(
        f"{spelled}/no_{spelled}" if default is True else spelled,
        *(row.help, row.metavar),
        repeated=isinstance(default, tuple),
        hidden=hidden,
    )


PANELS: Panels = _panels()
"""Every option, by the panel of the help that shows it."""


def script_arguments(more_templates: Sequence[str] = ()) -> dict[str, Any]:
    """The template, and the words that follow two dashes."""

    def complete(incomplete: str) -> list[str]:
        from hpc_toolkit.slurm.render.script import template_names

        names = [*template_names(), *more_templates]
        return [name for name in names if name.startswith(incomplete)]

    kinds = f"work-queue, array, campaign, command or train-... [default: {DEFAULT_TEMPLATE}]"
    program = "Program of the template 'command', or script of 'train-...'."
    return {
        "template": Annotated[str | None, Argument("[TEMPLATE]", kinds, complete=complete)],
        "command": Annotated[list[str] | None, Argument("[-- COMMAND...]", program)],
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

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options; ``--help-all`` also lists the names that ``--sbatch`` checks."""
        super().format_options(ctx, formatter)
        if ctx.meta.get(ALL, False):
            rows = [(_sbatch_term(name), OPTIONS[name.replace("-", "_")].help) for name in FIELDS]
            write_rows(formatter, "Names that --sbatch checks", rows)

    def invoke(self, ctx: Any) -> Any:
        """Call the function, with the fields that ``--sbatch`` sets beside the other options."""
        if ctx.params["sbatch"]:
            from hpc_toolkit.slurm.render.file import read_sbatch

            ctx.params |= read_sbatch(ctx.params.pop("sbatch"))
        return super().invoke(ctx)


def _sbatch_term(name: str) -> str:
    from hpc_toolkit.slurm.render.file import needs_value

    metavar = OPTIONS[name.replace("-", "_")].metavar
    if needs_value(name):
        return f"{name}={metavar}"
    return f"{name}[={metavar}]" if metavar else name


_REFERENCE = re.compile(r"\$(\{?[A-Za-z_]|\()")
_EXPANDS = re.compile(r"(.*/)?((ba|z|da|k|fi)?sh|awk|perl)")


def _moved(option: str, words: list[str]) -> ConfigError | None:
    """The error for an option that ``--sbatch`` takes; None for any other unknown option."""
    from hpc_toolkit.slurm.render.file import needs_value

    name = option.removeprefix("--")
    if name not in (*FIELDS, *PASSED, *PASSED_ALONE):
        return None
    after = zip(words, [*words[1:], ""], strict=True)
    word, value = next(pair for pair in after if pair[0].partition("=")[0] == option)
    text = word.removeprefix("--")
    if word == option and needs_value(name):
        text += f"={value or 'VALUE'}"
    hint = f"write --sbatch {shlex.quote(text)}"
    return ConfigError(f"no such option: {option}", hint=hint, exit_code=2)


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
        raise RenderError(f"unknown template: {kind!r}", hint=near_miss(kind, template_names()))
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

    given = values.get("sbatch", ())
    replaced = {other for name in values for other in rivals_of(name)}
    replaced |= {left_out(text).replace("-", "_") for text in given}
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
    if "gpus_per_node" in values:
        values |= read_gpus(values["gpus_per_node"])
    return values


def read_gpus(text: str) -> dict[str, Any]:
    """The fields of ``[TYPE:]N``."""
    kind, colon, count = text.rpartition(":")
    if not (count.isascii() and count.isdecimal() and len(count) < 10) or (colon and not kind):
        msg = f"--gpus-per-node: {text!r} is not a number of GPUs"
        raise ConfigError(msg, hint="write 4, or l40s:4 to choose the type")
    return {"gpus_per_node": int(count)} | ({"gpu_type": kind} if kind else {})


def read_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--env: {text!r} has no '='", hint="write NAME=VALUE")
    return name, value
