"""A lab runs the Slurm of another Debian release, and its users notice only the version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.lab.settings import LabSettings
from hpc_toolkit.lab.state import members
from hpc_toolkit.run import Run
from tests.integration.realrun import HANG_S, wait_until
from tests.slurm.reallab import LabUnderTest
from tests.slurm.slurmroot import debian_root

SUITE = "trixie"
PROGRAM = f"{sys.executable} -P -m hpc_toolkit"


@pytest.fixture(scope="module")
def root() -> Path:
    try:
        return debian_root(SUITE, print)
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def trixie(root: Path, lab_directory: Path) -> Iterator[LabUnderTest]:
    """A lab with the Slurm of another release; its commands are called as ``lab env`` says."""
    settings = LabSettings(2, 1, accounting=True, root=str(root))
    with LabUnderTest(lab_directory / SUITE, settings) as started:
        yield started


def shell(lab: LabUnderTest, text: str, cwd: Path) -> subprocess.Popen[str]:
    """A user's shell after ``lab env``, just started in the first command's place."""
    enter = f'eval "$({PROGRAM} lab env --dir {lab.directory})"; {text}'
    return subprocess.Popen(
        ["sh", "-euc", enter], cwd=cwd, env=lab.env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def printed(lab: LabUnderTest, text: str, cwd: Path) -> str:
    """The output of a shell that must succeed."""
    with shell(lab, text, cwd) as process:
        out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, out
    return out.strip()


def mounts_of(token: str) -> list[str]:
    """The processes that see a mount of a lab."""
    found = []
    for one in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            text = one.read_text()
        except OSError:
            continue
        if token in text:
            found.append(one.parent.name)
    return found


@pytest.mark.long
def test_a_run_is_submitted_to_the_slurm_of_another_release_and_nothing_is_left(
    root: Path, lab_directory: Path, tmp_path: Path
) -> None:
    lab = LabUnderTest(lab_directory / "another", LabSettings(2, 1, root=str(root)))
    argv = ("--nodes=2", "--gpus-per-node=1", f"--slurm={root}", f"--dir={lab.directory}")
    (tmp_path / "bench.py").write_text(
        "from pathlib import Path\n"
        "def iterate(item):\n"
        "    return {'release': Path('/etc/debian_version').read_text(), 'here': str(Path.cwd())}\n"
    )
    try:
        up = lab.run(*PROGRAM.split(), "lab", "up", *argv).stdout
        assert up.startswith(f"2 nodes with 1 l40s each, root {root}, up after ")
        token = lab.lab.paths.token
        assert mounts_of(token)

        version = printed(lab, "sbatch --version", tmp_path).split()[-1]
        printed(
            lab,
            f"{PROGRAM} init runs/b --workload bench:iterate --count 4 --key seed;"
            f"{PROGRAM} submit --cluster lab --nodes 2 --gpus-per-node 1 --run runs/b",
            tmp_path,
        )
        wait_until(lambda: Run.open(tmp_path / "runs/b").status().complete, "the run to complete")
        assert "complete after" in printed(lab, f"{PROGRAM} status runs/b", tmp_path)

        values = printed(lab, f"{PROGRAM} gather runs/b -o rows.csv; cat rows.csv", tmp_path)
        assert (root / "etc/debian_version").read_text().strip() in values
        assert str(tmp_path) in values
        status = lab.run(*PROGRAM.split(), "lab", "status", f"--dir={lab.directory}").stdout
        assert status.startswith(f"up, {lab.settings.words}, Slurm {version}, port ")
        inside = lab.run(
            *PROGRAM.split(), "lab", "exec", f"--dir={lab.directory}", "slurmd", "-V"
        ).stdout
        assert inside == f"slurm-wlm {version}\n"
        assert (root / "etc/debian_version").read_text().startswith("13"), "not this machine's"
    finally:
        lab.down()
    assert members(token) == []
    assert mounts_of(token) == []
    assert not lab.directory.exists()


@pytest.mark.soak
def test_a_lab_is_known_inside_its_root_and_survives_a_crash_and_its_own_jobs(
    trixie: LabUnderTest, tmp_path: Path
) -> None:
    lab = f"--dir {trixie.directory}"

    assert printed(trixie, f"srun -N1 {PROGRAM} lab status {lab}", tmp_path).startswith("up, 2 n")
    told = printed(trixie, f"srun -N1 {PROGRAM} lab down {lab} 2>&1 || true", tmp_path)
    assert "error: this process runs inside a lab" in told

    # Daemons of this release then execute themselves again.
    printed(trixie, "scontrol reconfigure", tmp_path)
    assert trixie.lab.crash("n2") > 0
    trixie.lab.restore("n2")
    assert printed(trixie, "srun -w n2 hostname", tmp_path) == "n2"
    assert trixie.lab.status().state == "up"


def test_env_puts_the_commands_of_one_lab_first_in_path(
    trixie: LabUnderTest, lab: LabUnderTest, tmp_path: Path
) -> None:
    again = f'eval "$({PROGRAM} lab env --dir {trixie.directory})"; echo "$PATH"'
    other = f'eval "$({PROGRAM} lab env --dir {lab.directory})"; echo "$PATH"; sinfo -h -p main'

    assert printed(trixie, again, tmp_path) == f"{trixie.lab.paths.clients}:{trixie.env['PATH']}"
    path, nodes = printed(trixie, other, tmp_path).splitlines()
    assert path == trixie.env["PATH"]
    assert "idle n[1-8]" in nodes
