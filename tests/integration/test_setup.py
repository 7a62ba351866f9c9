"""``.ci/setup`` makes the virtual environment of a checkout, whatever the checkout's path is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
# A build backend inside the project, so that pip downloads nothing.
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "tiny"
version = "1"

[dependency-groups]
dev = ["tiny[small]"]
"""
BACKEND = """
import zipfile

FILES = {
    "METADATA": "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\nProvides-Extra: dev\\n",
    "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "RECORD": "",
    "entry_points.txt": "[console_scripts]\\nhpctk = gc:disable\\n",
}

def build_editable(directory, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{directory}/tiny-1-py3-none-any.whl", "w") as wheel:
        for name, text in FILES.items():
            wheel.writestr(f"tiny-1.dist-info/{name}", text)
    return "tiny-1-py3-none-any.whl"
"""


def set_up(folder: Path) -> str:
    """Set up a small project in a folder; returns what ``.ci/setup`` printed."""
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(CHECKOUT / ".ci/setup", folder / ".ci")
    (folder / "constraints.txt").touch()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    done = subprocess.run(
        [folder / ".ci/setup", "few,dev"],
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PIP_NO_INDEX": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.soak  # every 'make test' begins with .ci/setup
@pytest.mark.parametrize(
    ("name", "starts"), [("größe-日本&'%d';$HOME", True), ('it\'s "quoted"', False)]
)
def test_setup_installs_in_a_path_of_any_letters(tmp_path: Path, name: str, starts: bool) -> None:
    folder = tmp_path / name

    printed = set_up(folder)

    version = "from importlib.metadata import version; print(version('tiny'))"
    python = folder / ".venv/bin/python"
    assert subprocess.run([python, "-c", version], capture_output=True, check=True).stdout == b"1\n"
    # pip's programs find their interpreter through a shell where its path has a space.
    assert ("use '.venv/bin/python -m hpc_toolkit'" not in printed) is starts
    assert (subprocess.run([folder / ".venv/bin/hpctk"], check=False).returncode == 0) is starts
