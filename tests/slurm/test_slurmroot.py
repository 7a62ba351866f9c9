"""Roots with another Slurm: never built half, and the tests in them run this checkout."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.slurm import slurmroot
from tests.slurm.slurmroot import NoRootError, Roots, check_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]


def test_a_build_that_ended_half_way_is_not_used(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(suite: str, root: Path) -> None:
        built.append(root)
        if len(built) == 1:
            raise NoRootError(suite)
        (root / "finished").touch()

    roots = Roots(tmp_path, build)
    with pytest.raises(NoRootError, match="trixie"), roots.held("trixie"):
        pass

    for _ in range(2):
        with roots.held("trixie") as root:
            assert (root / "finished").exists()

    assert len(built) == 2


def test_a_machine_that_cannot_have_a_root_says_why_and_skips_only_if_it_may(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurmroot, "PROGRAMS", ("debootstrap-of-nobody",))

    def code(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["slurmroot", *options, "--", "true"])
        return slurmroot.main()

    monkeypatch.delenv("HPCTK_FORBID_SKIP", raising=False)
    assert (code(), code("--or-skip")) == (1, 0)
    monkeypatch.setenv("HPCTK_FORBID_SKIP", "1")
    assert code("--or-skip") == 1
    reason = "skipped on Debian trixie: debootstrap-of-nobody missing: run .ci/system"
    assert capsys.readouterr().err.splitlines() == [reason] * 3


# --- in the root that 'make test-newslurm' uses ---

# Runs in the repository and mounts it below an empty directory that covers one of the above.
# Arguments: that directory, the name of the checkout in it, a command.
ELSEWHERE = """
mount -t tmpfs tmpfs "$1"
mkdir "$1/$2"
mount --bind . "$1/$2"
ln -s "$2" "$1/link"
cd "$1/link"
shift 2
exec "$@"
"""
NAME = 'it\'s a "fresh" déjà,vu: $1'
LOOK = """
import ctypes, decimal, os, sqlite3, ssl, sys, zlib
import hpc_toolkit
release = open("/etc/os-release").read().partition("CODENAME=")[2].split()[0]
print(release, os.environ["PWD"], os.getcwd(), hpc_toolkit.__file__, sep="\\n")
"""


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    try:
        check_machine()
        with Roots(slurmroot.cache_directory()).held(slurmroot.SUITE) as found:
            yield found
    except NoRootError as error:
        pytest.skip(str(error))


def command(python: str | Path, *words: str) -> list[str]:
    return [str(python), "-m", "tests.slurm.slurmroot", "--", *words]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first test may have to build the root
class TestRoot:
    def test_a_checkout_is_at_its_own_path(self, root: Path) -> None:
        base = "/dev/shm"
        words = command(".venv/bin/python", ".venv/bin/python", "-c", f"import numpy\n{LOOK}")

        done = subprocess.run(
            ["unshare", "--mount", "sh", "-euc", ELSEWHERE, "sh", base, NAME, *words],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )

        assert done.returncode == 0, done.stderr
        checkout = f"{base}/{NAME}"
        assert done.stdout.splitlines()[1:] == [
            *("trixie", f"{base}/link", checkout, f"{checkout}/hpc_toolkit/__init__.py")
        ]

    def test_a_command_can_make_namespaces_of_a_user_and_sees_nothing_of_the_machine(
        self, root: Path
    ) -> None:
        look = "unshare --user --mount true && cut -d' ' -f5 /proc/self/mountinfo"
        done = subprocess.run(
            command(sys.executable, "sh", "-c", look),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )

        assert done.returncode == 0, done.stderr
        # Spaces in paths are octal there (proc(5)).
        mounted = {one.replace(r"\040", " ") for one in done.stdout.splitlines()[1:]}
        assert {"/", "/proc", "/tmp", str(REPOSITORY)} <= mounted
        assert not {one for one in mounted if ".machine" in one or "overlay" in one}

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
    def test_a_signal_reaches_the_command_which_may_clear_up(
        self, root: Path, number: signal.Signals
    ) -> None:
        script = "trap 'echo ended; exit 3' INT TERM; echo up; while :; do sleep 0.1; done"
        with subprocess.Popen(
            command(sys.executable, "sh", "-c", script),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert "up\n" in lines
            process.send_signal(number)

            assert list(lines) == ["ended\n"]

        assert process.returncode == 3

    def test_a_command_ends_with_the_process_that_runs_it(self, root: Path) -> None:
        script = "setsid sleep 60 & echo up; sleep 60; echo late"
        with subprocess.Popen(
            command(sys.executable, "sh", "-c", script),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert "up\n" in lines
            process.kill()

            # The pipe ends when the last process that could write to it has ended.
            assert list(lines) == []
