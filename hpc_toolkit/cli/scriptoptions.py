"""Commands that render a job script: all of them take the options of ``scripttable``."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument

from hpc_toolkit.cli.optiontable import TableCommand
from hpc_toolkit.cli.scripttable import PANELS
from hpc_toolkit.errors import ConfigError, RenderError, near_miss
from hpc_toolkit.system.options import only_given

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.spec import ScriptSpec

DEFAULT_TEMPLATE = "work-queue"


class ScriptCommand(TableCommand):
    """A command that takes what a script is rendered from, beside the options of its own.

    Its function is ``function(template, *, ..., **given)``. ``template`` is None where the user
    gave none; ``given`` goes to ``requested`` as it is.
    """

    panels = PANELS

    def arguments(self) -> list[TyperArgument]:
        """The template, and what follows two dashes."""
        return [
            TyperArgument(
                param_decls=["template"],
                metavar="[TEMPLATE]",
                help="work-queue, array, campaign, command, ray or train-... "
                f"[default: {DEFAULT_TEMPLATE}]",
                autocompletion=self._complete_template,
            ),
            TyperArgument(
                param_decls=["command"],
                nargs=-1,
                metavar="[-- COMMAND...]",
                help="Program of the template 'command' or 'ray', or script of 'train-...'.",
            ),
        ]

    def templates(self) -> list[str]:
        """What TEMPLATE may be."""
        from hpc_toolkit.slurm.render.script import template_names

        return template_names()

    def _complete_template(self, _context: object, _words: list[str], incomplete: str) -> list[Any]:
        return [name for name in self.templates() if name.startswith(incomplete)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; for one of sbatch that is none of ours, name ``--sbatch``."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # noqa: BLE001 - of click, or of the copy of it in typer
            unknown = getattr(error, "option_name", None) or ""
            raise (_moved(unknown, words) if unknown else None) or error from None

    def invoke(self, ctx: Any) -> Any:
        """Call the function, with the fields that ``--sbatch`` sets beside the other options."""
        if ctx.params["sbatch"]:
            from hpc_toolkit.slurm.render.spec import read_sbatch

            ctx.params |= read_sbatch(ctx.params.pop("sbatch"))
        return super().invoke(ctx)


class _MovedOptionError(ConfigError):
    """An option of sbatch is given without ``--sbatch``."""

    exit_code = 2


def _moved(option: str, words: list[str]) -> ConfigError | None:
    """The error for an option that ``--sbatch`` takes; None for any other unknown option."""
    from hpc_toolkit.slurm.render.passthrough import FIELDS
    from hpc_toolkit.slurm.render.spec import needs_value

    name = option.removeprefix("--")
    if name not in FIELDS:
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
    stderr how the cluster was found. Raises ConfigError or RenderError.
    """
    from hpc_toolkit.slurm.clusters.choice import resolve_cluster
    from hpc_toolkit.slurm.render.script import render_script, template_names
    from hpc_toolkit.slurm.render.spec import ScriptSpec

    values = _over(base or {}, _fields(given))
    kind = template or values.get("template", DEFAULT_TEMPLATE)
    refuse_run(kind)
    if kind not in template_names():
        # Else the job's name, which is the template's by default, would be blamed.
        msg = f"no template is called {kind!r}"
        raise RenderError(msg, hint=_meant(kind, template_names()))
    found = resolve_cluster(values.get("cluster"))
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    values = {name: value for name, value in values.items() if name not in ("cluster", "template")}
    if "python" not in values and not values.get("plain"):
        values["python"] = _python(values)
    values.setdefault("job_name", kind)
    spec = ScriptSpec(**values)
    cluster = found.cluster
    if "/" in cluster.argument or cluster.argument.endswith(".toml"):
        # The header names it for renderings from any directory.
        cluster = replace(cluster, argument=os.path.abspath(cluster.argument))
    return spec, cluster, render_script(spec, cluster, kind)


def _meant(kind: str, known: list[str]) -> str:
    """What to do about a template that is none of Slurm's."""
    if kind.startswith("kubernetes"):
        return "'hpctk render kubernetes-queue', -ddp or -scaling writes what kubectl applies"
    return near_miss(kind, known)


def refuse_run(template: str | None) -> None:
    """Refuse a run in the place of a template, where other commands take it."""
    if template and os.path.isfile(os.path.join(template, "run.json")):
        msg = f"{template} is a run and no template"
        raise ConfigError(msg, hint=f"name it with --run {template}")


def _over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``values`` instead of its own, and without what they exclude."""
    if not base:
        return values
    from hpc_toolkit.slurm.render.rules import RIVALS

    replaced = {name for rivals in RIVALS if values.keys() & set(rivals) for name in rivals}
    return {**{name: base[name] for name in base if name not in replaced}, **values}


def _python(values: dict[str, Any]) -> str:
    """The interpreter of a request without ``--python``: its environment's, else this one."""
    conda = values.get("conda") or ""
    home = values.get("venv") or (conda if conda.startswith("/") else "")
    # Not resolved: the link in a virtual environment is what makes Python use the environment.
    return f"{home.rstrip('/')}/bin/python" if home else os.path.abspath(sys.executable)


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of ScriptSpec that the options set."""
    values = only_given(given)
    if "module" in values:
        values["modules"] = values.pop("module")
    if "env" in values:
        values["env"] = [read_variable(text) for text in values["env"]]
    if "gpus_per_node" in values:
        values |= _gpus(values["gpus_per_node"])
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def _gpus(text: str) -> dict[str, Any]:
    """Count and, where it is given, type of ``[TYPE:]N``."""
    kind, colon, count = text.rpartition(":")
    if not (count.isascii() and count.isdecimal() and len(count) < 10) or (colon and not kind):
        msg = f"--gpus-per-node: {text!r} is no number of GPUs"
        raise ConfigError(msg, hint="write 4, or l40s:4 for a type that is not the cluster's")
    return {"gpus_per_node": int(count)} | ({"gpu_type": kind} if kind else {})


def read_variable(text: str) -> tuple[str, str]:
    """Name and value of ``NAME=VALUE``. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if not equals:
        msg = f"--env: {text!r} has no '='"
        raise ConfigError(msg, hint="write NAME=VALUE")
    return name, value
