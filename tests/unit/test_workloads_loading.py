"""Mistakes that come naturally where a workload is named from Python, and code that changed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import WorkloadError
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import WorkloadSpec
from hpc_toolkit.worker.code import code_file
from hpc_toolkit.worker.loading import load_workload

_numbers = itertools.count()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of code in the current directory, whose module no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / f"written_{next(_numbers)}.py"
    yield path
    sys.modules.pop(path.stem, None)


def write(path: Path, name: str, value: int) -> None:
    """Code whose size tells its versions apart, as two of one second could not be."""
    path.write_text(f"# {'v' * value}\ndef {name}(item):\n    return {{'value': {value}}}\n")


def result(path: Path, name: str) -> dict[str, Any]:
    """What a workload gives for an item."""
    spec = WorkloadSpec(function=f"{path.stem}:{name}", path=(str(path.parent),))
    return next(load_workload(spec).run(None, iter([{}])))


def here(item: dict[str, Any]) -> dict[str, Any]:
    return item


@pytest.mark.parametrize(
    ("workload", "name"), [(here, "here"), ("__main__:here", "here"), (3, "NAME")]
)
def test_code_that_workers_cannot_import_is_refused(
    workload: Any, name: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkloadError, match="workers import code from files") as caught:
        Run.create(tmp_path / "run", [{}], workload=workload)

    hint = f"write the function to a file such as work.py, and name it: 'work:{name}'"
    assert caught.value.hint == hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "code",
    [
        "async def work(x): return 1",
        "def work(x): yield 1",
        "async def work(x): yield 1",
        "class work:\n    async def __call__(self, x): return 1",
        "class work:\n    def load(self, g): pass\n    async def run(self, c, items): yield 1",
    ],
)
def test_code_that_runs_after_its_call_returns_is_refused(
    source: Path, tmp_path: Path, code: str
) -> None:
    source.write_text(code)

    with pytest.raises(WorkloadError, match=r"work(\.run)? is async or has a yield"):
        Run.create(tmp_path / "run", [{"x": 1}], workload=f"{source.stem}:work")


@pytest.mark.parametrize(
    ("parameters", "items", "result"),
    [
        ("lr, depth", [{"lr": 1, "depth": 2}], {"lr": 1, "depth": 2}),
        ("seed, lr=0.1", [{"seed": 1}, {"seed": 2, "lr": 3}], {"seed": 1, "lr": 0.1}),
        ("lr, **rest", [{"lr": 1, "x": 2}], {"lr": 1, "rest": {"x": 2}}),
        ("*, lr", [{"lr": 1}], {"lr": 1}),
        ("**rest", [{"x": 2}], {"rest": {"x": 2}}),
        ("item", [{"item": 3}], {"item": 3}),
        ("", [{}], {}),
        ("item", [{"seed": 1}, {"lr": 5}], {"item": {"seed": 1}}),
        ("item=None", [{"seed": 1}], {"item": {"seed": 1}}),
        ("item, lr=0.1, *, steps=3", [{"lr": 1}], {"item": {"lr": 1}, "lr": 0.1, "steps": 3}),
        ("item, /", [{"seed": 1}], {"item": {"seed": 1}}),
        ("item, /", [{"item": 3}], {"item": {"item": 3}}),
        ("*args, **kwargs", [{"x": 2}], {"args": ({"x": 2},), "kwargs": {}}),
        ("lr, depth", [{"lr": 1}], "item 0 has no key 'depth', which M:run needs"),
        ("lr", [{"lr": 1, "x": 2}], "item 0 has the key 'x', which M:run does not take"),
        ("lr", [{"lr": 1}] * 300 + [{"sed": 1}], "item 300 has no key 'lr', which M:run needs"),
        ("", [{"x": 1}], "item 0 has the key 'x', which M:run does not take"),
        ("lr=0.1, steps=3", [{"seed": 1}, {"lr": 5}], "item 0 has the key 'seed', which M:run"),
        (
            "item",
            [{"x": n} for n in range(300)] + [{"item": 1}],
            "item 300 has the key 'item', but",
        ),
        ("a, b, /", [{"a": 1, "b": 2}], "item 0 cannot be given to M:run, which takes 'a' by"),
    ],
)
@pytest.mark.parametrize("kind", ["function", "class"])
def test_a_function_gets_the_keys_of_the_items_that_fit_it_or_the_item(
    source: Path, parameters: str, items: list[dict[str, Any]], result: Any, kind: str
) -> None:
    unique = [{**item, "lr": n} if item == {"lr": 1} else item for n, item in enumerate(items, 1)]
    text = f"def run({parameters}):\n    return locals()\n"
    if kind == "class":
        inside = f"({parameters})".replace("()", "(self)").replace("(", "(self, ", 1)
        inside = inside.replace("(self, self)", "(self)")
        text = f"class run:\n    def __call__{inside}:\n        self = locals().pop('self')\n"
        text += "        found = dict(locals())\n        found.pop('self')\n        return found\n"
    source.write_text(text)
    name = f"{source.stem}:run"

    if isinstance(result, str):
        with pytest.raises(WorkloadError) as caught:
            Run.create(source.parent / "run", unique, workload=name)
        assert result.replace("M:run", name) in caught.value.message
        assert caught.value.hint
        assert not (source.parent / "run").exists()
        return
    made = Run.create(source.parent / "run", unique, workload=name)
    work = Run.open(made.root).manifest.stages[0].workload
    assert next(load_workload(work).run(None, iter(unique[:1]))) == result


def test_a_file_that_was_written_again_is_read_again(source: Path) -> None:
    write(source, "first", 1)
    assert result(source, "first") == {"value": 1}

    write(source, "first", 2)
    assert result(source, "first") == {"value": 2}
    write(source, "second", 3)
    assert result(source, "second") == {"value": 3}
    with pytest.raises(WorkloadError, match="has no 'first'"):
        result(source, "first")
    source.write_text("def second(item: return\n")
    for _ in range(2):
        with pytest.raises(WorkloadError, match="cannot be imported: SyntaxError"):
            result(source, "second")


@pytest.mark.parametrize("inside", ["", "outer", "outer.inner", "outer.inner.third"])
def test_code_inside_packages_without_a_file_of_their_own_is_found_and_not_imported(
    tmp_path: Path, inside: str
) -> None:
    directory = tmp_path.joinpath(*inside.split("."))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "code.py").write_text("raise RuntimeError\n")
    named = f"{inside}.code:f".removeprefix(".")

    found = code_file(WorkloadSpec(function=named, path=(str(tmp_path),)))

    assert found == directory / "code.py"
    assert "outer" not in sys.modules
