"""Render a job script: a pure function of the request, the cluster's facts and the templates.

``check_drift`` compares a script with the one that would be rendered today.

Rendering reads no clock, no host name and no scheduler, so a script is the same on any machine.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import shlex
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from hpc_toolkit import __version__
from hpc_toolkit.errors import HpcToolkitError, RenderError, near_miss
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render import file as scripts
from hpc_toolkit.slurm.render.directives import complete, directive_text, directives
from hpc_toolkit.slurm.render.kinds import check_template, plain_words, prepared, training
from hpc_toolkit.slurm.render.spec import read_spec
from hpc_toolkit.slurm.render.surroundings import surroundings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable
    from pathlib import Path

    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.file import Header
    from hpc_toolkit.slurm.render.spec import ScriptSpec

_SUFFIX = ".sbatch.j2"
_PARENTS = ("base", "plain")
"""Templates that others extend, and that are not rendered by themselves."""
_PARENT = re.compile(r"{% extends \"([^\"]+)\" %}")
# Text that every reader of YAML takes for text, although it is not quoted.
_PLAIN_YAML = re.compile(
    r"(?!(?i:y|n|yes|no|on|off|true|false|null)\Z)[A-Za-z/][A-Za-z0-9_./-]*", re.ASCII
)
_KEY_MAX = 122
"""Longest YAML key that is written without a question mark in front of it."""

_SHORT = 16
"""Hexadecimal digits of a hash that guards against accidents."""
_WIDTH = 116


class _Marked(str):
    """Text that a filter has made safe for the place where the template puts it."""

    __slots__ = ()


def template_names() -> list[str]:
    files = [entry.name for entry in _templates().iterdir()]
    names = {name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)}
    return sorted(names.difference(_PARENTS))


def render_script(spec: ScriptSpec, cluster: Cluster, template: str = "work-queue") -> str:
    """Render a script that ends in a newline. Equal arguments give equal text on every machine.

    Raises RenderError: unknown template, or a request that ``cluster`` cannot accept.
    """
    if template not in template_names():
        msg = f"unknown template: {template!r}"
        raise RenderError(msg, hint=near_miss(template, template_names()))
    check_template(spec, template)
    full = complete(prepared(spec, template, cluster), cluster)
    trained = training(full, template, cluster)
    options = directives(full, cluster)
    program = trained.program if trained else full.command
    quoted = (
        plain_words(full, options, template, trained.options if trained else ())
        if full.plain
        else map(shlex.quote, program)
    )
    file = ("plain" if full.plain else template) + _SUFFIX
    around = surroundings(full, cluster, options, template, trained)
    command = scripts.command_line(spec, template, cluster.argument or cluster.file)
    values = {
        "version": __version__,
        "command": [_comment_text(shlex.quote(word)) for word in command],
        "template": template,
        "template_sha256": scripts.sha256("".join(_lineage(file)))[:_SHORT],
        "cluster": cluster.name,
        "cluster_sha256": scripts.sha256(json.dumps(cluster.stated(), sort_keys=True))[:_SHORT],
        "doubt": "" if cluster.verified or not cluster.source else " (facts not verified)",
        "directives": options,
        "around": around,
        "batch": (*around.batch, *(["--campaign"] if template == "campaign" else [])),
        "plain": full.plain,
        "several": template == "train-multi-node",
        "words": tuple(quoted),
    }
    return scripts.sign(fill(file, values))


def fill(file: str, values: dict[str, Any]) -> str:
    """Fill the template ``file`` of a job script or of a manifest."""
    return _environment().get_template(file).render(values)


def _lineage(file: str) -> list[str]:
    text = _source(file)
    parent = _PARENT.match(text)
    return [*(_lineage(parent[1]) if parent else []), text]


@functools.cache
def _templates() -> Traversable:
    return resources.files("hpc_toolkit.slurm") / "data" / "templates"


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
        # The default, "{#", occurs in every "${#array[@]}" of bash.
        comment_start_string="<#--",
        comment_end_string="--#>",
    )
    environment.filters.update(
        sh=lambda text: _Marked(shlex.quote(text)),
        sh_words=lambda words: _Marked(shlex.join(words)),
        commented=lambda command: _Marked(_wrapped(command, "#   ", "#     ")),
        started=_started,
        run=lambda words: _Marked(_wrapped([*words, '"$@"'], "", "  ")),
        text=_comment_text,
        line=_Marked,
        directive=lambda option: _Marked(directive_text(option)),
        yaml=_yaml,
        literal=lambda word: _yaml(word.replace("$", "$$")),
        entries=_entries,
    )
    return environment


def _refuse_unmarked(value: Any) -> Any:
    if isinstance(value, _Marked) or type(value) is int:
        return value
    msg = f"template: {value!r} is written into the script without a filter"
    raise RenderError(msg, hint="use |sh, |sh_words, |directive, |yaml or |text")


def _wrapped(words: list[str], first: str, further: str) -> str:
    """Quoted words as a command over several lines, each ending in a backslash but the last."""
    lines, line = [], first + words[0]
    for word in _with_values(words[1:]):
        if len(line) + len(word) + 3 > _WIDTH:
            lines.append(f"{line} \\")
            line = further + word
        else:
            line += f" {word}"
    return "\n".join([*lines, line])


def _with_values(words: list[str]) -> Iterator[str]:
    """The words, with an option and its value as one."""
    at = 0
    while at < len(words):
        pair = words[at : at + 2]
        takes = pair[0].startswith("--") and "=" not in pair[0] and not pair[-1].startswith("-")
        yield " ".join(pair) if takes and pair[0] != "--" else pair[0]
        at += 2 if takes and pair[0] != "--" else 1


def _started(batch: tuple[str, ...], words: tuple[str, ...]) -> _Marked:
    """The line that starts the batch process; ``words``, of the user's program, are quoted."""
    argv = [*map(shlex.quote, batch), "--", '"$0"', *words, '"$@"']
    return _Marked(_wrapped(argv, "exec ", "  "))


def _comment_text(text: str) -> _Marked:
    """Check that text for a comment or a name stays on its line."""
    if not text.isprintable():
        msg = f"template: {text!r} would not stay on one line"
        raise RenderError(msg, hint="remove the control characters")
    return _Marked(text)


def _yaml(text: str) -> _Marked:
    """Write text as a YAML scalar: a plain word, or JSON with other characters escaped as in YAML.

    Kubernetes would read ``y`` and ``1e3`` without quotes as a boolean and as a number.
    """
    if _PLAIN_YAML.fullmatch(text):
        return _Marked(text)
    # YAML has no pairs of surrogates, and some characters outside ASCII end a line of it.
    return _Marked(re.sub("[^ -~]", _escaped, json.dumps(text, ensure_ascii=False)))


def _escaped(character: re.Match[str]) -> str:
    code = ord(character[0])
    letter, digits = ("x", 2) if code < 0x100 else ("u", 4) if code < 0x10000 else ("U", 8)
    return f"\\{letter}{code:0{digits}X}"


def _entries(mapping: dict[str, str], indent: int) -> _Marked:
    """Write the entries of a YAML mapping; all lines after the first are indented."""
    line = "\n" + " " * indent
    keys = (_yaml(key) if len(key) <= _KEY_MAX else f"? {_yaml(key)}{line}" for key in mapping)
    pairs = zip(keys, mapping.values(), strict=True)
    return _Marked(line.join(f"{key}: {_yaml(value)}" for key, value in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    file: str
    reasons: tuple[str, ...]
    """Why the texts differ; empty for a file that is up to date."""
    script: str
    rendered: str | None
    """The current rendering; None if the request cannot be read or is not accepted any more."""

    def difference(self) -> str:
        old, new = self.script.splitlines(True), (self.rendered or "").splitlines(True)
        return "".join(difflib.unified_diff(old, new, self.file, f"{self.file} (rendered now)"))


def check_drift(path: Path) -> Drift:
    """Render the script at ``path`` again from the request in its header, and compare.

    A file that cannot be read, or is not a rendered script, counts as different.
    """
    script = ""
    try:
        script = scripts.read_script(path)
        header = scripts.read_header(script, str(path))
    except RenderError as error:
        reason = error.message.removeprefix(f"{path}: ")
        return Drift(file=str(path), reasons=(reason,), script=script, rendered=None)
    edited = scripts.origin(script) == "edited"
    reasons = ["edited by hand"] if edited else []
    try:
        cluster = load_cluster(header.cluster)
        spec = read_spec(header.request)
        rendered = render_script(spec, cluster, header.template)
    except HpcToolkitError as error:
        reasons.append(f"its request is refused now: {error.message}")
        return Drift(file=str(path), reasons=tuple(reasons), script=script, rendered=None)
    if script != rendered:
        reasons += _changes(header, scripts.read_header(rendered, str(path))) or (
            [] if reasons else ["rendered differently"]
        )
    return Drift(file=str(path), reasons=tuple(reasons), script=script, rendered=rendered)


def _changes(old: Header, new: Header) -> list[str]:
    found = []
    if old.version != new.version:
        found.append(f"rendered by hpctk {old.version}, this is {__version__}")
    if old.template_sha256 != new.template_sha256:
        found.append(f"the template {old.template} changed")
    if old.cluster_sha256 != new.cluster_sha256:
        found.append(f"the facts of the cluster {old.cluster} changed")
    return found
