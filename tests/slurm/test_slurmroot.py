"""Roots with another Slurm: built once, never half, and able to run what runs here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.slurm import slurmroot
from tests.slurm.slurmroot import NoRootError, Roots, check_machine, linked_names, outermost

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]


class Builder:
    """Builds a root of one file, and counts how often; what it does first can be replaced."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.fails = False

    def __call__(self, suite: str, root: Path) -> None:
        self.built.append(suite)
        (root / "begun").touch()
        if self.fails:
            raise NoRootError(suite)
        (root / "finished").touch()


@pytest.fixture
def builder() -> Builder:
    return Builder()


def test_a_root_is_built_once(tmp_path: Path, builder: Builder) -> None:
    roots = Roots(tmp_path / "roots", builder)

    for suite in ("trixie", "trixie", "sid", "trixie"):
        with roots.held(suite) as root:
            assert (root / "finished").exists()

    assert builder.built == ["trixie", "sid"]


def test_a_build_that_ended_half_way_is_not_used(tmp_path: Path, builder: Builder) -> None:
    roots = Roots(tmp_path, builder)
    builder.fails = True
    with pytest.raises(NoRootError, match="trixie"), roots.held("trixie"):
        pass
    assert list(tmp_path.glob("*/begun"))

    builder.fails = False
    with roots.held("trixie") as root:
        assert (root / "finished").exists()

    assert len(list(tmp_path.glob("*/begun"))) == 1


def test_a_second_builder_waits_for_the_first(tmp_path: Path, builder: Builder) -> None:
    begun, go_on = threading.Event(), threading.Event()
    found: list[Path] = []

    def slow(suite: str, root: Path) -> None:
        begun.set()
        assert go_on.wait(60)
        builder(suite, root)

    def hold() -> None:
        with Roots(tmp_path, slow).held("trixie") as root:
            assert (root / "finished").exists()
            found.append(root)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for one in threads:
        one.start()
    assert begun.wait(60)
    go_on.set()
    for one in threads:
        one.join(60)

    assert builder.built == ["trixie"]
    assert len(found) == 2
    assert found[0] == found[1]


def test_a_new_recipe_builds_again_and_removes_the_old_root_once_nobody_uses_it(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = Roots(tmp_path, builder)
    with roots.held("trixie") as old:
        monkeypatch.setattr(slurmroot, "PACKAGES", ("second",))
        with roots.held("trixie") as new:
            assert new != old
        assert old.is_dir()
    monkeypatch.setattr(slurmroot, "PACKAGES", ("third",))

    with roots.held("trixie") as newest:
        pass

    assert [
        one for one in tmp_path.iterdir() if one.name.startswith("trixie") and one.is_dir()
    ] == [newest]
    assert builder.built == ["trixie"] * 3


def test_every_link_from_an_executable_to_its_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "python3.11").touch()
    (tmp_path / "bin" / "python3").symlink_to("../python3.11")
    (tmp_path / "python").symlink_to(tmp_path / "bin" / "python3")

    found = list(linked_names(tmp_path / "python"))

    assert found == [tmp_path / "python", tmp_path / "bin" / "python3", tmp_path / "python3.11"]


def test_paths_below_others_are_left_out() -> None:
    paths = map(Path, ["/a/b", "/a", "/ab", "/a/b/c", "/", "/d e"])

    assert outermost(paths) == [Path("/a"), Path("/ab"), Path("/d e")]


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

NEEDED = (Path(sys.base_prefix), slurmroot.cache_directory())
BASES = [
    base
    for base in ("/tmp", "/dev/shm", "/home", "/opt", "/usr/local")
    if not any(one.is_relative_to(base) for one in NEEDED)
]
# One may be the system's, whose prefix is /usr.
INTERPRETERS = [
    one
    for one in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}")
    if Path(one).exists()
]
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
    @pytest.mark.parametrize("base", BASES)
    def test_a_checkout_anywhere_is_at_its_own_path(self, root: Path, base: str) -> None:
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

    @pytest.mark.parametrize("python", INTERPRETERS)
    def test_an_interpreter_of_this_machine_runs(self, root: Path, python: str) -> None:
        done = subprocess.run(
            command(python, python, "-c", LOOK),
            cwd=REPOSITORY,
            env={"PATH": os.environ["PATH"], "PWD": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )

        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[1] == "trixie"

    def test_a_root_is_as_it_was_after_a_command(self, root: Path) -> None:
        done = subprocess.run(
            command(sys.executable, "touch", "/usr/new", "/tmp/new"), cwd=REPOSITORY, check=False
        )

        assert done.returncode == 0
        assert not (root / "usr/new").exists()
        assert not Path("/tmp/new").exists()

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
