"""Which files of the user's a run executes, how a change of code shows, copies and fingerprints."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.errors import WorkloadError
from hpc_toolkit.run import Run
from hpc_toolkit.worker.code import executed
from hpc_toolkit.worker.fingerprints import fingerprint

_numbers = itertools.count()


@dataclass
class Project:
    """A directory of code whose modules no other test has imported."""

    root: Path
    name: str

    def write(self, file: str, text: str) -> Path:
        path = self.root / file.replace("NAME", self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NAME", self.name))
        return path

    def make(self, **settings: Any) -> Run:
        return Run.create("run", [{}], **({"workload": f"{self.name}:f"} | settings))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    made = Project(tmp_path, f"code_{next(_numbers)}")
    made.write("NAME.py", "def f(item):\n    return {}\n")
    yield made
    for name in set(sys.modules) - before:
        if made.name in name:
            del sys.modules[name]


def changes(run: Run) -> str:
    """The names of changed files in the refusal; "" if nothing changed."""
    try:
        executed(run.paths, run.manifest, strict=True)
    except WorkloadError as error:
        return error.message.partition("changed since init: ")[2]
    return ""


@pytest.mark.parametrize(
    ("imports", "file"),
    [
        ("", "NAME.py"),
        ("import NAME_helper", "NAME_helper.py"),
        ("from NAME_helper import *", "NAME_helper.py"),
        ("def later():\n    import NAME_helper", "NAME_helper.py"),
        ("import importlib\nimportlib.import_module('NAME_helper')", "NAME_helper.py"),
        ("import NAME_package", "NAME_package/__init__.py"),
        ("def later():\n    import NAME_package.inner.deep", "NAME_package/__init__.py"),
        ("def later():\n    import NAME_package.inner.deep", "NAME_package/inner/deep.py"),
        ("from NAME_package.inner import deep", "NAME_package/inner/beside.py"),
        ("from NAME_package.inner import deep", "NAME_package/above.py"),
        ("from NAME_space.inner import deep", "NAME_space/inner/deep.py"),
        ("def later():\n    import NAME_native", f"NAME_native{EXTENSION_SUFFIXES[0]}"),
        ("import NAME_link", "NAME_link.py"),
        ("import NAME_other", "NAME_other.py"),
        ("if TYPE_CHECKING:\n    import NAME_helper", ""),
        ("try:\n    import NAME_absent\nexcept ImportError:\n    pass", ""),
    ],
)
@pytest.mark.parametrize("how", ["edited", "gone", "touched"])
def test_a_module_outside_the_installation_that_changes_is_named(
    project: Project, monkeypatch: pytest.MonkeyPatch, imports: str, file: str, how: str
) -> None:
    main = project.write("NAME.py", f"TYPE_CHECKING = False\n{imports}\ndef f(item):\n    pass\n")
    project.write("NAME_helper.py", "one = 1\n")
    for name in ("__init__.py", "above.py", "inner/__init__.py", "inner/beside.py"):
        project.write(f"NAME_package/{name}", "")
    project.write("NAME_package/inner/deep.py", "from . import beside\nfrom .. import above\n")
    for name in ("NAME_space/inner/deep.py", f"NAME_native{EXTENSION_SUFFIXES[0]}"):
        project.write(name, "")
    target = project.write("elsewhere/target.py", "")
    (project.root / f"{project.name}_link.py").symlink_to(target)
    # As an editable installation does.
    project.write("source/NAME_other.py", "")
    monkeypatch.syspath_prepend(project.root / "source")
    run = project.make()
    assert changes(run) == ""

    inside = f"source/{file}" if "other" in file else file
    path = project.root / inside.replace("NAME", project.name) if file else main.with_name("x")
    if file and how == "edited":
        path.write_bytes(path.read_bytes() + b"\n")
    elif file and how == "gone":
        path.unlink()
    elif file:
        os.utime(path, (1, 1))

    assert changes(run) == ("" if how == "touched" else file.replace("NAME", project.name))


def test_what_pip_put_into_a_directory_is_no_code_of_the_user(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by 'pip install --target', and PYTHONPATH: thousands of files, which no user edits."""
    monkeypatch.syspath_prepend(project.root)
    imports = "import NAME_package, NAME_single, NAME_own"
    project.write("NAME.py", f"{imports}\ndef f(item):\n    pass\n")
    record = "NAME_package/__init__.py,sha256=x,1\nNAME_single.py,,\nNAME-1.dist-info/RECORD,,\n"
    project.write("NAME-1.dist-info/RECORD", record.replace("NAME", project.name))
    for file in ("NAME_package/__init__.py", "NAME_single.py", "NAME_own.py"):
        project.write(file, "")

    found = project.make().manifest.provenance["files"]

    assert set(found["items"]) == {f"{project.name}.py", f"{project.name}_own.py"}


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        *(("python train.py --lr {lr}", one) for one in ("train.py", "helper.py")),
        *(("cd . && ./tool {lr}; true", "tool"), ("cat data.csv; echo {lr}", "")),
        *(("sh src/run.sh {lr}|cat", "src/run.sh"), ("python 'train.py' {lr}", "train.py")),
    ],
)
def test_a_script_of_a_command_that_changes_is_named(
    project: Project, command: str, changed: str
) -> None:
    project.write("train.py", "import helper\n")
    project.write("src/run.sh", "")
    project.write("tool", "").chmod(0o755)
    for name in ("helper.py", "data.csv"):
        project.write(name, "")
    run = Run.create("run", [{"lr": 1}], command=command)
    assert changes(run) == ""

    (project.root / (changed or "data.csv")).write_text("other")

    assert changes(run) == changed


def test_copies_are_executed_wherever_the_run_is_and_whatever_the_original_becomes(
    project: Project,
) -> None:
    project.write("NAME.py", "import NAME_package.deep\ndef f(item):\n    pass\n")
    project.write("NAME_package/__init__.py", "")
    deep = project.write("NAME_package/deep.py", "")
    project.write("NAME_package/unused.py", "")
    project.make(copy_code=True)
    deep.write_text("other")
    project.write("NAME.py", "").unlink()
    shutil.copytree("run", "moved", symlinks=True)

    run = Run.open("moved")
    path = executed(run.paths, run.manifest, strict=True)["items"].workload.path

    assert path == (str(project.root / "moved/code/items"), str(project.root))
    copied = {one.relative_to(path[0]) for one in Path(path[0]).rglob("*.py")}
    assert {str(one).replace(project.name, "NAME") for one in copied} == {
        *("NAME.py", "NAME_package/__init__.py", "NAME_package/deep.py")
    }
    (Path(path[0]) / f"{project.name}.py").write_text("")
    assert changes(run) == f"{project.name}.py"


def test_a_command_calls_the_copies_of_its_scripts(project: Project) -> None:
    project.root.joinpath("a {b}").mkdir()
    os.chdir("a {b}")
    Path("train.py").write_text("import helper\n")
    Path("helper.py").write_text("")
    Path("tool").write_text("")
    Path("tool").chmod(0o777)
    run = Run.create(
        "run", [{"lr": 1}], command="python 'train.py' train.pyc {lr}|./tool", copy_code=True
    )

    command = executed(run.paths, run.manifest, strict=True)["items"].workload.command

    place = f"{project.root}/a {{{{b}}}}/run/code/items"
    assert command == f"python '{place}/train.py' train.pyc {{lr}}|'{place}/tool'"
    assert stat.S_IMODE((run.paths.code / "items/tool").stat().st_mode) == 0o755
    assert (run.paths.code / "items/helper.py").exists()


SCRIPT = """
import collections, dataclasses, datetime, decimal, enum, functools, hashlib, math, os, pathlib, re
import threading, typing
import helpers
import package.sub
import numpy as np
from hpc_toolkit.calls import Caller
from hpc_toolkit.calls.recorded import key_of
from hpc_toolkit.worker.fingerprints import fingerprint, of_function

caller = Caller(pathlib.Path("calls"))
digest = lambda key: hashlib.sha256(key).hexdigest()
LIMIT = 5
ATTRIBUTE = 1

@dataclasses.dataclass
class Config:
    lr: float
    tags: set

class Color(enum.Enum):
    RED = 1

class Model:
    def __init__(self, k):
        self.k = k
    def predict(self, x):
        return self.k * x + LIMIT

def plain(x, y=2):
    "What it does."
    names = {"left", "right", "up", "down"}
    return helpers.scale(x) + LIMIT if x in names else [y for y in range(x)]

def make(k):
    def inner(x):
        return x + k
    return inner

@functools.lru_cache
def cached(x):
    return x + 1

def reads(x):
    return package.sub.scale(x.ATTRIBUTE)

class Generic(typing.Generic[typing.TypeVar("T")]):
    pass

loop = [1]
loop.append(loop)
node = Model(5)
node.neighbours = {node, Model(6)}
VALUES = [
    1, "x", 1.5, None, (1, "a"), {"b": 1, "a": {2, 3, "x", "y"}}, frozenset("abcdef"), b"x",
    loop, node,
    np.arange(5), np.float32(1), np.array(["a"], dtype=object), datetime.date(2026, 1, 2),
    decimal.Decimal("1.10"), pathlib.Path("a"), Config(0.1, {"p", "q", "r"}), Color.RED, Model(3),
    re.compile("a+"), collections.OrderedDict(a=1), threading.Lock(), slice(1, 2), range(3), Model,
    os.environ, {1, "a", None, (1, "x"), frozenset("abc")}, {frozenset("abc"), frozenset("xyz")},
    {Model(1), Color.RED}, Generic, {"functions": [plain, Model], 1: {plain, make(5)}},
]
FUNCTIONS = [plain, make(3), make(4), Model(3).predict, cached, lambda x: x + LIMIT, "abc".upper,
             functools.partial(plain, 1), math.sqrt, Model, reads]
for value in VALUES:
    print(*fingerprint(value), digest(key_of(caller.call(len, [value], {}).item)))
for function in FUNCTIONS:
    print(*of_function(function))
"""
HELPERS = "FACTOR = 2\ndef scale(x):\n    return x * FACTOR\n"


def fingerprints(
    tmp_path: Path, script: str = SCRIPT, helpers: str = HELPERS, seed: int = 1
) -> list[str]:
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "helpers.py").write_text(helpers)
    (tmp_path / "package").mkdir(exist_ok=True)
    (tmp_path / "package" / "sub.py").write_text(helpers)
    environ = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    environ["PYTHONHASHSEED"] = str(seed)
    argv = [sys.executable, "script.py"]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode().splitlines()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return fingerprints(tmp_path_factory.mktemp("first"))


def test_fingerprints_are_the_same_in_every_process_and_differ_from_each_other(
    tmp_path: Path, first: list[str]
) -> None:
    assert fingerprints(tmp_path, seed=2) == first
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        (
            {
                '    "What it does."': '    "What it does now."',
                "LIMIT = 5": "# a comment\n\nLIMIT = 5",
                "ATTRIBUTE = 1": "ATTRIBUTE = 2",  # not what x.ATTRIBUTE reads
                "FACTOR = 2": "def other():\n    pass\nFACTOR = 2",
            },
            0,
        ),
        ({"for y in range(x)": "for z in range(x)"}, 3),  # of plain, and of what has it
        ({"y=2": "y=3"}, 3),
        ({"return x + k": "return x - k"}, 3),
        ({"return self.k * x": "return self.k + x"}, 7),  # the class, its objects and its method
        ({"LIMIT = 5": "LIMIT = 6"}, 10),
        # In modules of the user.
        ({"x * FACTOR": "x / FACTOR"}, 4),
        ({"FACTOR = 2": "FACTOR = 3"}, 4),
    ],
)
def test_what_changed_has_another_fingerprint(
    tmp_path: Path, first: list[str], changes: dict[str, str], changed: int
) -> None:
    script, helpers = SCRIPT, HELPERS
    for before, after in changes.items():
        script, helpers = script.replace(before, after), helpers.replace(before, after)
    second = fingerprints(tmp_path, script, helpers)

    assert sum(one != other for one, other in zip(first, second, strict=True)) == changed


class Called:
    def __init__(self, factor: int) -> None:
        functools.update_wrapper(self, len)
        self.factor = factor

    def __call__(self) -> int:
        return self.factor


def chain(length: int, last: int) -> list[Any]:
    found: list[Any] = [last]
    for _ in range(length):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((re.compile("a"), re.compile("b")), (np.sin, np.cos), ({1: 1}.keys(), {2: 1}.keys())),
        (MappingProxyType({1: 1}), MappingProxyType({1: 2})),
        (np.zeros(2, [("a", "i4")]), np.zeros(2, [("x", "i4")])),
        (np.array(["2020"], "M8[D]"), np.array(["2021"], "M8[D]")),
        *((Called(1), Called(2)), (property(lambda self: 1), property(lambda self: 2))),
        ([(n,) for n in range(110_000)], [(n,) for n in range(109_999)] + [(0,)]),
        *((chain(300, 1), chain(300, 2)), (FunctionType, MethodType), (b"a", b"b")),
        (zip([1], [2], strict=True), zip([1], [3], strict=True)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_values_that_differ_have_other_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_a_large_array_that_changed_in_place_has_another_fingerprint() -> None:
    array = np.zeros(1 << 20)
    first = fingerprint(array)
    assert fingerprint(array.copy()) == first == fingerprint(array)

    array[-1] = 1

    assert fingerprint(array) != first
    array[-1] = 0
    assert fingerprint(array) == first
