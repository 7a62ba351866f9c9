"""Render a job script: a pure function of the request, the cluster's facts and the templates.

Rendering reads no clock, no host name and no scheduler, so a script is the same on any machine.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import jinja2

from hpc_toolkit import __version__
from hpc_toolkit.errors import RenderError, near_miss
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.containers import plain_lines
from hpc_toolkit.slurm.render import file as scripts
from hpc_toolkit.slurm.render import kinds, setup_words
from hpc_toolkit.slurm.render.directives import (
    Directive,
    complete,
    cpus_of_rank,
    directive_text,
    directives,
    ranks,
)
from hpc_toolkit.slurm.render.spec import MAX_RESTARTS, QUEUES, ScriptSpec, shown
from hpc_toolkit.system.processes import WARNING_NAMES

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


_SUFFIX = ".sbatch.j2"
_PARENTS = ("base", "plain")
"""Templates that others extend, and that are not rendered by themselves."""
_PARENT = re.compile(r"{% extends \"([^\"]+)\" %}")
_SHORT = 16
"""Hexadecimal digits of a hash that guards against accidents."""
_WIDTH = 116
Step = tuple[list[str], str]
"""The words of a command, and the log message if the command fails."""

_KIND = {**dict.fromkeys(QUEUES, "work"), "command": "command"}
"""The subcommand of hpctk batch; "train" for a training."""


class Marked(str):
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
    kinds.check_template(spec, template)
    full = complete(kinds.prepared(spec, template, cluster), cluster)
    started = kinds.started(full, template, cluster)
    options = directives(full, cluster)
    quoted = (
        kinds.plain_words(full, options, template, cluster)
        if full.plain
        else map(shlex.quote, started.program)
    )
    file = ("plain" if full.plain else template) + _SUFFIX
    around = surroundings(full, cluster, options, template, started)
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
        "batch": around["batch"],
        "plain": full.plain,
        "several": template == "train-multi-node",
        "words": tuple(quoted),
    }
    return scripts.sign(fill(file, values))


def fill(file: str, values: dict[str, Any], **filters: Callable[..., Marked]) -> str:
    """Fill the template ``file`` of a job script or of a manifest, which has filters of its own."""
    environment = _environment()
    environment.filters.update(filters)
    return environment.get_template(file).render(values)


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
        sh=lambda text: Marked(shlex.quote(text)),
        sh_words=lambda words: Marked(shlex.join(words)),
        commented=lambda command: Marked(_wrapped(command, "#   ", "#     ")),
        started=_started,
        run=lambda words: Marked(_wrapped([*words, '"$@"'], "", "  ")),
        text=_comment_text,
        line=Marked,
        directive=lambda option: Marked(directive_text(option)),
    )
    return environment


def _refuse_unmarked(value: Any) -> Any:
    if isinstance(value, Marked) or type(value) is int:
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


def _started(batch: tuple[str, ...], words: tuple[str, ...]) -> Marked:
    """The line that starts the batch process; ``words``, of the user's program, are quoted."""
    argv = [*map(shlex.quote, batch), "--", '"$0"', *words, '"$@"']
    return Marked(_wrapped(argv, "exec ", "  "))


def _comment_text(text: str) -> Marked:
    """Check that text for a comment or a name stays on its line."""
    if not text.isprintable():
        msg = f"template: {text!r} would not stay on one line"
        raise RenderError(msg, hint="remove the control characters")
    return Marked(text)


def surroundings(
    full: ScriptSpec,
    cluster: Cluster,
    directives: list[Directive],
    template: str,
    started: kinds.Started,
) -> dict[str, Any]:
    """All that a script does before hpctk takes over; the keys are in the order of a script.

    Raises RenderError: the request needs a fact that the site's file does not state.
    """
    given = {name for name, _ in directives}
    modules = [
        (["module", "load", name], f"cannot load module {name}")
        for name in (*cluster.modules, *full.modules)
    ]
    setup = [setup_words(line, "--setup") for line in (*cluster.setup, *full.setup)]
    container: list[str] = []
    if full.plain and full.container:
        container = plain_lines(kinds.container_of(full, cluster), gpus=full.gpus_per_node > 0)
    return {
        "shebang": "#!/bin/bash -l" if cluster.login_shell else "#!/bin/bash",
        "env": (*cluster.env, *_network(full, cluster), *full.env),
        "preparation": (*modules, *_conda(full, cluster)),
        "venv": (full.venv or "").rstrip("/"),
        "setup": [(words, f"setup failed: {' '.join(words)}") for words in setup],
        "teardown": [setup_words(line, "--teardown") for line in full.teardown],
        "threads": _threads(full, given, started.processes),
        "warnings": WARNING_NAMES,
        # Lines of a plain script that set the bash array of that name.
        "container": container,
        # The command of the batch process, up to "--" and the words of the job.
        "batch": (
            *(full.python or "", "-P", "-m", "hpc_toolkit", "batch", _KIND.get(template, "train")),
            *(f"--{name}={value}" for name, value in _values(full, cluster, given, template)),
            *(["--stage-env"] if full.stage_env else ()),
            *(["--one-rank"] if full.one_rank else ()),
            *started.options,
            *(["--campaign"] if template == "campaign" else ()),
        ),
    }


def _values(
    full: ScriptSpec, cluster: Cluster, given: set[str], template: str
) -> Iterator[tuple[str, object]]:
    """Options of the batch process, those that are not its defaults."""
    of_a_task = ranks(full) if "gpus-per-task" in given else 1
    standard = {
        "run": (full.run, None),
        "gpus": (full.gpus_per_node // of_a_task, 0),
        "max-restarts": (full.max_restarts, MAX_RESTARTS),
        "array-offset": (full.array_offset, 0),
        "workers-per-task": (full.workers_per_task or 1, 1),
    }
    yield from ((name, value) for name, (value, usual) in standard.items() if value != usual)
    for name in ("idle_exit", "lease"):
        if seconds := getattr(full, name):
            yield name.replace("_", "-"), shown(name, seconds)
    # Not in an array, whose last element scontrol would take for all of them.
    several = full.nodes > 1 and not (full.array or full.container or full.one_rank)
    if template == "work-queue" and cluster.shrink_jobs and several:
        yield "shrink-every", "1min"
    commands = {"node-setup": (*cluster.node_setup, *full.node_setup), "teardown": full.teardown}
    for name, lines in commands.items():
        yield from ((name, shlex.join(setup_words(line, f"--{name}"))) for line in lines)
    if full.stage_dir:
        yield "stage-dir", full.stage_dir
    if full.container is not None:
        yield from _container(full, cluster, template)


def _container(full: ScriptSpec, cluster: Cluster, template: str) -> Iterator[tuple[str, object]]:
    container = kinds.container_of(full, cluster)
    name = PurePosixPath(container.words[0]).name
    yield name, full.container
    if container.words != (name,):
        yield "container-words", shlex.join(container.words)
    if container.gpu:
        yield "gpu-maker", container.gpu
    for directory in container.binds:
        yield "bind", directory
    if template != "command":
        yield "container-python", full.container_python


def _threads(full: ScriptSpec, given: set[str], processes: int) -> str:
    """The value of OMP_NUM_THREADS, as bash reads it."""
    if processes > 1 and "cpus-per-task" in given:
        return f"$((SLURM_CPUS_PER_TASK > {processes} ? SLURM_CPUS_PER_TASK / {processes} : 1))"
    return "$SLURM_CPUS_PER_TASK" if "cpus-per-task" in given else str(cpus_of_rank(full))


def _network(full: ScriptSpec, cluster: Cluster) -> tuple[tuple[str, str], ...]:
    """Return the site's network variables: all with GPUs, else those of Gloo for a training."""
    if full.gpus_per_node:
        return cluster.nccl
    trains = full.launch is not None
    return tuple(pair for pair in cluster.nccl if trains and pair[0].startswith("GLOO_"))


def _conda(full: ScriptSpec, cluster: Cluster) -> tuple[Step, ...]:
    if full.conda is None:
        return ()
    path = PurePosixPath(full.conda)
    base = cluster.conda_base
    if base is None and path.is_absolute() and path.parent.name == "envs":
        base = str(path.parents[1])
    if base is None:
        msg = f"--conda: the path of conda is unknown ({cluster.written('conda_base')})"
        raise RenderError(msg, hint="set it there, or give the environment's path .../envs/NAME")
    functions = f"{base.rstrip('/')}/etc/profile.d/conda.sh"
    # Not 'conda init', which would edit the user's ~/.bashrc.
    return (
        (["source", functions], f"no conda in {base}"),
        (["conda", "activate", full.conda], f"cannot activate {full.conda}"),
    )
