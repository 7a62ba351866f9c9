"""A job script as text: a pure function of the request, the cluster's facts and the templates.

No clock, no host name and no scheduler is asked, so a script is the same wherever it is rendered.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from dataclasses import asdict
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from hpc_toolkit import __version__
from hpc_toolkit.allowlist import setup_words
from hpc_toolkit.directives import complete, directives
from hpc_toolkit.errors import RenderError, near_miss
from hpc_toolkit.scriptfile import sha256, sign
from hpc_toolkit.scriptspec import command_line, spec_json

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from hpc_toolkit.clusters import Cluster
    from hpc_toolkit.directives import Directive
    from hpc_toolkit.scriptspec import ScriptSpec

_SUFFIX = ".sbatch.j2"
_BASE = f"base{_SUFFIX}"
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+=,-]+")


class _Marked(str):
    """Text that a filter has made safe for the place where the template puts it."""

    __slots__ = ()


def template_names() -> list[str]:
    """Names of the templates that can be rendered, sorted."""
    files = [entry.name for entry in _templates().iterdir()]
    names = [name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)]
    return sorted(name for name in names if name != "base")


def render_script(spec: ScriptSpec, cluster: Cluster, template: str = "work-queue") -> str:
    """The script, ending in a newline. Equal arguments give equal text on every machine.

    Raises RenderError: unknown template, or a request that ``cluster`` cannot give.
    """
    if template not in template_names():
        msg = f"no template is called {template!r}"
        raise RenderError(msg, hint=near_miss(template, template_names()))
    full = complete(spec, cluster)
    request = spec_json(spec, template=template, cluster=cluster.name)
    values = {
        "version": __version__,
        "command": command_line(spec, template=template, cluster=_cluster_argument(cluster)),
        "template": template,
        "template_sha256": sha256(_source(_BASE) + _source(template + _SUFFIX)),
        "cluster": cluster.name,
        "cluster_sha256": _facts_sha256(cluster),
        "doubt": "" if cluster.verified or not cluster.source else " (facts not verified)",
        "spec_sha256": sha256(request),
        "spec_json": request,
        "directives": directives(full, cluster),
        "job_name": full.job_name,
        "python": full.python,
        "run": full.run or "",
        "env": [*cluster.env, *full.env],
        "modules": [*cluster.modules, *full.modules],
        "setup": [setup_words(line, "--setup") for line in (*cluster.setup, *full.setup)],
        "requeue": full.requeue,
        "max_restarts": full.max_restarts,
    }
    return sign(_environment().get_template(template + _SUFFIX).render(values))


def _cluster_argument(cluster: Cluster) -> str:
    # A built-in file has a name of its own; another one is found by its path only.
    return cluster.name if cluster.file == f"clusters/{cluster.name}.toml" else cluster.file


def _facts_sha256(cluster: Cluster) -> str:
    facts = asdict(cluster)
    # The path of the file differs between machines, what it says does not.
    del facts["file"]
    return sha256(json.dumps(facts, sort_keys=True))


@functools.cache
def _templates() -> Traversable:
    return resources.files("hpc_toolkit") / "templates"


@functools.cache
def _source(file: str) -> str:
    return (_templates() / file).read_text(encoding="utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        optimized=False,  # folding constants takes longer than rendering once
        loader=jinja2.FunctionLoader(_source),
        undefined=jinja2.StrictUndefined,
        finalize=_refuse_unmarked,
        autoescape=False,  # noqa: S701 - a shell script; _refuse_unmarked takes its place
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # The default, "{#", stands in every "${#array[@]}".
        comment_start_string="<#--",
        comment_end_string="--#>",
    )
    environment.filters.update(
        sh=lambda text: _Marked(shlex.quote(text)),
        sh_words=lambda words: _Marked(shlex.join(words)),
        text=_comment_text,
        directive=_directive,
    )
    return environment


def _refuse_unmarked(value: Any) -> Any:
    if isinstance(value, _Marked) or type(value) is int:
        return value
    msg = f"template: {value!r} is written into the script without a filter"
    raise RenderError(msg, hint="use |sh, |sh_words, |directive or |text")


def _comment_text(text: str) -> _Marked:
    """Text for a comment or a name: it stays on its line."""
    if not text.isprintable():
        msg = f"template: {text!r} would not stay on one line"
        raise RenderError(msg, hint="remove the control characters")
    return _Marked(text)


def _directive(option: Directive) -> _Marked:
    """``--name=value`` as sbatch reads it from a ``#SBATCH`` line.

    sbatch groups words with quotes, drops backslashes and cuts at a ``#``; how these act inside
    quotes differs between versions (src/sbatch/opt.c), so none of them is let through.
    """
    name, value = option
    if value is None:
        return _comment_text(f"--{name}")
    if not value.isprintable() or set(value) & set("\"'\\#"):
        msg = f"--{name}: {value!r} cannot be written into a directive"
        raise RenderError(msg, hint="remove quotes, backslashes, '#' and control characters")
    return _Marked(f"--{name}={value}" if _PLAIN.fullmatch(value) else f'--{name}="{value}"')
