"""Modules are found at start-up as Python finds them; hints fit how hpctk was installed."""

from __future__ import annotations

import importlib
import importlib.util
import py_compile
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.system.installation import listed_imports


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on sys.path, whose modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def described(spec: Any) -> tuple[object, ...]:
    return (
        *(spec.name, spec.origin, spec.cached, spec.has_location),
        list(spec.submodule_search_locations or ()),
    )


def agreed(name: str) -> Any:
    """What Python's finder finds, which must also be found in the block."""
    expected = importlib.util.find_spec(name)
    with listed_imports():
        found = importlib.util.find_spec(name)
    assert (found is None) == (expected is None)
    assert expected is None or described(found) == described(expected)
    return expected


@pytest.mark.parametrize("name", ["xml.dom.minidom", "_json", "difflib", "numpy"])
def test_the_same_module_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in [one for one in sys.modules if one == name]:
        monkeypatch.delitem(sys.modules, known)

    agreed(name)


def test_modules_packages_and_namespaces_are_imported(place: Path) -> None:
    (place / "alone_x.py").write_text("value = 'alone'\n")
    for name in ("package_x", "namespace_x"):
        (place / name).mkdir()
    (place / "package_x" / "__init__.py").write_text("value = 'package'\n")
    (place / "package_x" / "inner.py").write_text("value = 'inner'\n")
    (place / "namespace_x" / "inner.py").write_text("value = 'named'\n")
    names = ["alone_x", "package_x", "package_x.inner", "namespace_x.inner"]

    with listed_imports():
        found = [importlib.import_module(name).value for name in names]

    assert found == ["alone", "package", "inner", "named"]
    with listed_imports(), pytest.raises(ModuleNotFoundError, match="missing_x"):
        importlib.import_module("package_x.missing_x")


@pytest.mark.parametrize("name", ["both_x", "both_x/__init__"])
def test_an_extension_module_comes_before_its_source(place: Path, name: str) -> None:
    for suffix in (".py", EXTENSION_SUFFIXES[0]):
        file = place / f"{name}{suffix}"
        file.parent.mkdir(exist_ok=True)
        file.write_text("")

    assert agreed("both_x").origin.endswith(EXTENSION_SUFFIXES[0])


def test_modules_of_an_archive_and_without_their_source_are_imported(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zipfile import ZipFile

    source = place / "sourceless_x.py"
    source.write_text("value = 'compiled'\n")
    py_compile.compile(str(source), cfile=str(place / "sourceless_x.pyc"))
    source.unlink()
    with ZipFile(place / "all.zip", "w") as archive:
        archive.writestr("zipped_x.py", "value = 'zipped'\n")
    for entry in (place / "all.zip", place / "gone"):
        monkeypatch.syspath_prepend(entry)

    with listed_imports():
        assert importlib.import_module("zipped_x").value == "zipped"
        assert importlib.import_module("sourceless_x").value == "compiled"


def test_what_is_not_a_file_hides_no_module(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "colorsys.py").symlink_to("nowhere")
    (place / "chunk.py").mkdir()
    for name in ("colorsys", "chunk"):
        monkeypatch.delitem(sys.modules, name, raising=False)

        agreed(name)
