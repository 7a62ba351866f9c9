"""Every place of a script that takes a text, and what became of each hostile one there."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.clusters.facts import Cluster, load_cluster, parse_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import read_spec
from hpc_toolkit.slurm.render.values import file_name
from tests.hostile import HOSTILE, ODD_BUT_FINE
from tests.slurm.reallab import LabUnderTest

PYTHON = "/opt/python"
ODD_PLACE = 'it\'s "the" $(touch canary) `place`; # \u540d\u524d'
"""Where jobs are submitted."""
STANDING = 'container_runtime = "apptainer"\n'
LAB = load_cluster("lab")

# What runs, wherever it is read as anything but text; "canary" is looked for afterwards.
TEXTS = tuple(dict.fromkeys((*HOSTILE, *ODD_BUT_FINE)))


@dataclass(frozen=True)
class Asked:
    """What a script is rendered from."""

    fields: dict[str, Any] = field(default_factory=dict)
    site: str = ""
    """A cluster's file; "" for the lab's."""
    name: str = "site"
    """Its name."""


@dataclass(frozen=True)
class Place:
    """One place that takes a text."""

    name: str
    """As the user knows it; of a cluster's file with "site " before it."""
    ask: Callable[[str], Asked]
    shapes: tuple[str, ...] = ("{}",)
    """What is around each hostile text, so that a check of the beginning alone lets it through."""
    directive: str = ""
    """The option of sbatch that shows it, where it is one."""

    def values(self) -> list[str]:
        return [shape.replace("{}", text) for shape in self.shapes for text in TEXTS]


@dataclass(frozen=True)
class Outcome:
    """What became of one text in one place."""

    place: Place
    value: str
    asked: Asked
    script: str | None
    """None if it was refused."""
    error: HpcToolkitError | None = None


def toml(value: str) -> str:
    """A string of TOML; one that holds half of a surrogate pair is none, and stays an error."""
    shown = [
        f"\\u{ord(one):04x}" if ord(one) < 32 or one in '"\\\x7f' or "\ud800" <= one <= "\udfff"
        else one
        for one in value
    ]  # fmt: skip
    return f'"{"".join(shown)}"'


def site(key: str, value: str, *, table: str = "", listed: bool = False) -> str:
    """A cluster's file with one hostile value."""
    text = f"[{toml(value)}]" if listed else toml(value)
    standing = "" if table else STANDING
    return f"{standing}{f'[{table}]' if table else ''}\n{key} = {text}\n"


def script(asked: Asked) -> str:
    """The script. Raises HpcToolkitError."""
    spec = read_spec({"python": PYTHON, **asked.fields})
    template = "work-queue"
    if spec.launch:
        template = "train-multi-node"
    elif spec.command:
        template = "command"
    elif spec.array is not None:
        template = "array"
    return render_script(spec, cluster(asked), template)


def cluster(asked: Asked) -> Cluster:
    """The facts. Raises HpcToolkitError."""
    if not asked.site:
        return replace(LAB, conda_base="/opt/conda", container_runtime="apptainer")
    return parse_cluster(asked.site, file="clusters/site.toml", name=asked.name)


def outcome(place: Place, value: str) -> Outcome:
    asked = place.ask(value)
    try:
        return Outcome(place, value, asked, script(asked))
    except HpcToolkitError as error:
        return Outcome(place, value, asked, None, error)


def option(name: str, *good: str, **needs: Any) -> Place:
    """An option of a script whose text stands there as it is."""
    word = name.replace("_", "-")
    return Place(
        word,
        lambda value: Asked({name: value, **needs}),
        ("{}", *(f"{one}{{}}" for one in good)),
        word,
    )


def many(name: str, key: str, *shapes: str, **needs: Any) -> Place:
    """A repeated option."""
    return Place(name, lambda value: Asked({key: (value,), **needs}), shapes)


def own(
    key: str,
    *shapes: str,
    table: str = "",
    listed: bool = False,
    needs: dict[str, Any] | None = None,
) -> Place:
    """A key of a cluster's file."""
    where = ": ".join(filter(None, (table, key)))
    return Place(
        f"site {where}",
        lambda value: Asked(needs or {}, site(key, value, table=table, listed=listed)),
        shapes or ("{}",),
    )


GPU = {"gpus_per_node": 1}
TRAIN = {"launch": "task-per-gpu", "command": ("train.py",)}
DIRECTORY = ("{}", "/x/{}")
INSIDE = {"container_python": "/opt/python"}

DIRECTIVES = (
    *(option("job_name", "a"), option("account", "a"), option("partition", "a,"), option("qos")),
    *(option("reservation", "a"), option("constraint", "a&")),
    *(option("nodelist", "n1,"), option("exclude", "n")),
    *(option("gpu_type", "l", **GPU), option("gpu_bind", "map_gpu:0,", **GPU)),
    *(option("gres", "nvme:"), option("mem", "1"), option("exclusive", "user")),
    *(option("mem_per_cpu", "1"), option("mem_per_gpu", "1", **GPU)),
    *(option("time", "1-"), option("time_min", "1:"), option("signal")),
    *(option("array", "0-", "0%"), option("dependency", "afterok:1")),
    *(option("output", "logs/", "%x."), option("error", "logs/")),
    *(option("open_mode", "append"), option("chdir", "/x/")),
    Place(
        "comment", lambda text: Asked({"sbatch": (f"comment={text}",)}), ("{}", "a {}"), "comment"
    ),
)
"""Places whose text goes to sbatch."""

BODY = (
    *(option("run", "x/"), option("python", "/x/")),
    *(option("conda", "/x/envs/"), option("venv", "/x/")),
    option("container", "/x/", "docker://", **INSIDE),
    option("container_python", "/x/", container="/x.sif"),
    *(option("idle_exit", "1"), option("lease", "10")),
    *(option("run_dir", "x/", **TRAIN), option("backend", "gloo", **TRAIN)),
    option("stage_dir", "/x/", stage=("/data/x",), **TRAIN),
    many("stage", "stage", *DIRECTORY, **TRAIN),
    option("launch", "task-per-gpu", command=TRAIN["command"]),
    *(option("cpu_bind", "cores", "map_cpu:0,", **TRAIN), option("mem_bind", "local,", **TRAIN)),
    option("numa_binding", "node", "core-", **TRAIN),
    *(option("distribution", "block:", **TRAIN), option("hint", "nomultithread", **TRAIN)),
    many("bind", "bind", *DIRECTORY, "/a:/x/{}", container="/x.sif", **INSIDE),
    many("module", "modules", "{}", "cuda/{}"),
    many("setup", "setup", "{}", "record {}"),
    many("node-setup", "node_setup", "{}", "record {}"),
    many("teardown", "teardown", "{}", "record {}"),
    Place("env value", lambda text: Asked({"env": (("A", text),)})),
    Place("env name", lambda text: Asked({"env": ((text, "1"),)}), ("{}", "A{}")),
    many("program", "command", *DIRECTORY),
    Place("program's word", lambda text: Asked({"command": ("p", text)})),
    many("sbatch", "sbatch", "{}", "input{}", "a{}=b"),
    many("sbatch value", "sbatch", "input={}", "mcs-label={}"),
)
"""Places whose text goes to the shell."""

SITE = (
    own("modules", "{}", "cuda/{}", listed=True),
    own("setup", "{}", "record {}", listed=True),
    own("node_setup", "{}", "record {}", listed=True),
    own("A", table="env"),
    own("NCCL_A", table="nccl", needs=GPU),
    own("conda_base", *DIRECTORY, needs={"conda": "e"}),
    own("binds", *DIRECTORY, listed=True, needs={"container": "/x.sif", **INSIDE}),
    Place(
        "site container_runtime",
        lambda text: Asked(
            {"container": "/x.sif", **INSIDE}, f"container_runtime = {toml(text)}\n"
        ),
        ("{}", "podman{}", "/x/{}/podman", "apptainer {}"),
    ),
    own("gpu_type", "{}", "l{}", needs=GPU),
    own("gpu_request", "{}", needs=GPU),
    own("max_walltime", "1-{}"),
    own("mem_per_node", "1{}"),
    *(own(key, "{}", "a{}", table="defaults") for key in ("account", "partition", "qos")),
    *(own(key, "{}", "a{}", table="defaults") for key in ("reservation", "constraint")),
    *(own(key, "{}", "a{}", table="defaults.sbatch") for key in ("comment", "hint", "image")),
    Place(
        "site sbatch name",
        lambda text: Asked({}, f'[defaults.sbatch]\n{toml(text)} = "1"\n'),
        ("{}", "a{}"),
    ),
    own("time", "1-{}", table="defaults"),
    own("mem", "1{}", table="defaults"),
    Place(
        "site partition",
        lambda text: Asked({}, f"choose_partition = true\n[[partitions]]\nname = {toml(text)}\n"),
        ("{}", "a{}"),
    ),
    Place(
        "site env name",
        lambda text: Asked({}, f'[env]\n{toml(text)} = "1"\n'),
        ("{}", "A{}"),
    ),
    Place(
        "site nccl name",
        lambda text: Asked(GPU, f'[nccl]\n{toml(text)} = "1"\n'),
        ("{}", "NCCL_{}"),
    ),
    Place(
        "site name",
        lambda text: Asked({}, "nodes = 1\n", name=text),
        ("{}", "a{}"),
    ),
    *(own(key) for key in ("description", "source", "account_hint")),
)
"""Places of a cluster's file."""

PLACES = (*DIRECTIVES, *BODY, *SITE)


NAMES = tuple(dict.fromkeys(place.name for place in PLACES))


@cache
def outcomes_in(name: str, of: int = 1) -> tuple[Outcome, ...]:
    """Every text in the places of this name, or one of so many: others in each place."""
    places = [place for place in PLACES if place.name == name]
    first = NAMES.index(name) % of
    return tuple(outcome(one, value) for one in places for value in one.values()[first::of])


def accepted(name: str, of: int = 1) -> list[Outcome]:
    return [one for one in outcomes_in(name, of) if one.script is not None]


def sbatch_options(told: str) -> dict[str, str]:
    """What ``sbatch --verbose`` says that it read; nothing if it refused the options at once."""
    block = told.partition("sbatch: defined options\n")[2].partition("sbatch: end of defined")[0]
    return dict(re.findall(r"^sbatch: ([a-z][a-z-]*) *: (.*)$", block, re.MULTILINE))


def can_be_a_name(text: str) -> bool:
    """Whether a file can be called so."""
    return text not in ("", ".", "..") and "/" not in text and len(os.fsencode(text)) <= 255


class Reader:
    """sbatch, asked what it reads in a script."""

    def __init__(self, lab: LabUnderTest, cwd: Path) -> None:
        self.lab, self.cwd, self.env = lab, cwd, lab.env

    def options(self, script: str) -> dict[str, str]:
        """What it read; its error where it gave up before."""
        path = self.cwd / "read.sbatch"
        path.write_text(script, encoding="utf-8")
        told = subprocess.run(
            ["sbatch", "--verbose", "--test-only", str(path)],
            cwd=self.cwd, env=self.env, capture_output=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        text = told.stderr.decode()
        return sbatch_options(text) or {"gave up": text}

    def differences(self, place: Place, values: Sequence[Outcome]) -> list[str]:
        """What sbatch reads other than it was asked for, of accepted texts of one place."""
        plain, found = None, []
        for one in values:
            assert one.script is not None
            if plain is None:
                fields = {**one.asked.fields}
                fields.pop("sbatch", None) or fields.pop(place.directive.replace("-", "_"))
                plain = self.options(script(Asked(fields, one.asked.site)))
            read = self.options(one.script)
            if place.directive == "nodelist" and "sbatch: error: " in read.get("gave up", ""):
                continue  # No list of nodes, or one of more than were asked for.
            names = one.value.split(",")
            # "gres/" since 23.11.
            gres = {",".join(f"gres{sign}{name}" for name in names) for sign in ":/"}
            wanted = {one.value, f"{self.cwd}/{one.value}", *gres}
            wanted |= {"a"} if place.directive == "open-mode" else set()
            odd = {name for name in read.keys() | plain.keys() if read.get(name) != plain.get(name)}
            odd -= {place.directive, *ALONG.get(place.directive, ())}
            # A name that cannot be a file's is changed for the log; see file_name().
            made = place.directive == "job-name" and file_name(one.value) in read["output"]
            odd -= {"output"} if made else set()
            if odd or read.get(place.directive, "") not in wanted:
                found.append(f"{place.name} {one.value!r}: {read.get(place.directive)!r}, {odd}")
        return found


ALONG = {
    **{f"mem-per-{of}": ("mem",) for of in ("cpu", "gpu")},
    "dependency": ("kill-on-invalid-dep",),
    "chdir": ("output",),
}
"""Options that change with another one."""
