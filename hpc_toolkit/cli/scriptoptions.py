"""The options of a job script, told once for every command that renders one.

They are made from a table, and not from the parameters of a function: typer would look at each
annotation twice whenever such a command starts, which takes longer than rendering the script.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from typer.core import TyperArgument, TyperCommand, TyperOption

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from hpc_toolkit.clusters import Cluster
    from hpc_toolkit.scriptspec import ScriptSpec

DEFAULT_TEMPLATE = "work-queue"
DEFAULT_CLUSTER = "generic"


class Option(NamedTuple):
    """One option; its name is the field's of ScriptSpec with dashes."""

    name: str
    """The parameter's name: the field's, or a singular of it."""
    help: str
    """One line for people."""
    metavar: str = "TEXT"
    """What the value is called; "N" for a whole number, "" for an option without a value."""
    repeated: bool = False
    """Whether it may be given more than once."""
    without: str | None = None
    """The value that the bare option stands for; None where a value is needed. As in sbatch, the
    value then follows an equals sign."""


def _flag(name: str, help_text: str) -> Option:
    return Option(name, help_text, "")


def _many(name: str, help_text: str, metavar: str = "TEXT") -> Option:
    return Option(name, f"{help_text}; may be repeated.", metavar, repeated=True)


PANELS: dict[str, tuple[Option, ...]] = {
    "Resources": (
        Option("nodes", "Number of nodes; by default 1.", "N"),
        Option("gpus_per_node", "GPUs on each node; by default none.", "N"),
        Option("ntasks_per_node", "Ranks on each node; by default one per GPU.", "N"),
        Option("cpus_per_task", "CPUs of a rank; by default its share.", "N"),
        Option("mem", "Memory of each node ('480G'); 0 is all of it.", "SIZE"),
        Option("mem_per_cpu", "Memory per CPU.", "SIZE"),
        Option("mem_per_gpu", "Memory per GPU.", "SIZE"),
        _flag("exclusive", "Share the nodes with no other job."),
    ),
    "Time": (
        Option("time", "Time limit, as sbatch reads it ('90' is minutes).", "TIME"),
        Option("signal", "B:USR1@SECONDS: when the ranks start to finish."),
        _flag("requeue/no-requeue", "Start again while items are left."),
        Option("max_restarts", "How often it may do so; by default 10.", "N"),
    ),
    "Placement": (
        Option(
            "cluster",
            "Whose limits and notation: a name of 'hpctk cluster list' or a TOML file.",
        ),
        Option("account", "Who pays."),
        Option("partition", "Comma-separated partitions."),
        Option("qos", "Quality of service."),
        Option("reservation", "Comma-separated reservations."),
        Option("constraint", "Node features."),
        Option("nodelist", "Nodes that must be used."),
        Option("exclude", "Nodes that must not be used."),
    ),
    "Job and its log": (
        Option("job_name", "Name of job and script; by default TEMPLATE."),
        Option("output", "The log; by default slurm/logs/%x-%j.out."),
        Option("comment", "A remark that Slurm keeps."),
        Option("mail_type", "Events that send mail."),
        Option("mail_user", "Who gets it."),
    ),
    "Environment": (
        Option("run", "The run; the script's argument overrides it."),
        Option("python", "Interpreter on the nodes; by default this one.", "FILE"),
        _many("module", "Load this module"),
        Option("conda", "Activate this conda environment: a name or an absolute path."),
        Option("venv", "Use this virtual environment.", "DIR"),
        Option("container", "Run the ranks in this image."),
        _many("bind", "Show this directory to the container", "FROM[:TO[:ro]]"),
        _many("env", "Export this variable", "NAME=VALUE"),
        _many("setup", "Run this command first", "COMMAND"),
        _many("node_setup", "Run this command first, once on every node", "COMMAND"),
        _many("teardown", "Run this command at the end", "COMMAND"),
    ),
}
"""Every option, by the panel of the help that shows it."""


class ScriptCommand(TyperCommand):
    """A command that takes what a script is rendered from, beside the options of its own."""

    def __init__(self, *args: Any, params: list[Any], **settings: Any) -> None:
        options = [_parameter(option, panel) for panel, group in PANELS.items() for option in group]
        super().__init__(*args, params=[*_arguments(), *params, *options], **settings)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write out the value of an option that stands without one."""
        end = args.index("--") if "--" in args else len(args)
        bare = {f"--{option.name}": option for option in _all() if option.without is not None}
        words = [f"{word}={bare[word].without}" if word in bare else word for word in args[:end]]
        return super().parse_args(ctx, [*words, *args[end:]])


def add_script_command(
    app: typer.Typer, function: Callable[..., None], *, panel: str, name: str | None = None
) -> None:
    """Add ``function(template, *, ..., **given)`` as a command with all options of a script.

    ``template`` is None where the user gave none. ``given`` goes to ``requested`` as it is.
    """
    signature = inspect.signature(function)
    own = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name != "template"
    ]
    # typer makes an option of each parameter that it sees; the others come from the table.
    function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    app.command(name, cls=ScriptCommand, rich_help_panel=panel)(function)


def requested(template: str | None, given: dict[str, Any]) -> tuple[ScriptSpec, Cluster, str]:
    """The request that the options make, the cluster's facts, and the script.

    ``given`` holds the parameters of a command; None and empty ones count as not given.
    Raises ConfigError or RenderError.
    """
    from hpc_toolkit.clusters import load_cluster
    from hpc_toolkit.render import render_script
    from hpc_toolkit.scriptspec import ScriptSpec

    kind = template or DEFAULT_TEMPLATE
    values = _fields(given)
    site = load_cluster(values.pop("cluster", DEFAULT_CLUSTER))
    # Not resolved: the link in a virtual environment is what makes Python use the environment.
    values.setdefault("python", os.path.abspath(sys.executable))
    values.setdefault("job_name", kind)
    spec = ScriptSpec(**values)
    return spec, site, render_script(spec, site, kind)


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of ScriptSpec that the options set."""
    values = {name: value for name, value in given.items() if value not in (None, (), [])}
    if "module" in values:
        values["modules"] = values.pop("module")
    if "env" in values:
        values["env"] = [_variable(text) for text in values["env"]]
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        msg = f"--env: {text!r} has no '='"
        raise ConfigError(msg, hint="write NAME=VALUE")
    return name, value


def _all() -> list[Option]:
    return [option for group in PANELS.values() for option in group]


def _arguments() -> list[TyperArgument]:
    return [
        TyperArgument(
            param_decls=["template"],
            metavar="[TEMPLATE]",
            help=f"Which kind of script; by default {DEFAULT_TEMPLATE}.",
        ),
        TyperArgument(
            param_decls=["command"],
            nargs=-1,
            metavar="[-- COMMAND...]",
            help="What the template 'command' runs.",
        ),
    ]


def _parameter(option: Option, panel: str) -> TyperOption:
    declared = "/".join(f"--{word.replace('_', '-')}" for word in option.name.split("/"))
    name = option.name.partition("/")[0]
    return TyperOption(
        param_decls=[name, declared],
        type=int if option.metavar == "N" else None if not option.metavar else str,
        is_flag=True if not option.metavar else None,
        default=None,
        multiple=option.repeated,
        metavar=option.metavar or None,
        help=option.help,
        autocompletion=_complete_cluster if name == "cluster" else None,
        rich_help_panel=panel,
    )


def _complete_cluster(_context: object, _words: list[str], incomplete: str) -> list[Any]:
    from hpc_toolkit.clusters import cluster_names

    return [name for name in cluster_names() if name.startswith(incomplete)]
