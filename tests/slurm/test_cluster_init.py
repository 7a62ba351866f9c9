"""A cluster file drafted from a real Slurm describes it, and its scripts are accepted there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.lab.directory import lab_paths
from hpc_toolkit.lab.lab import Lab
from hpc_toolkit.lab.programs import environment
from hpc_toolkit.lab.settings import LabSettings
from hpc_toolkit.slurm.clusters.facts import load_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.slurm.conftest import LabUnderTest


class Site:
    """A user without files of their own in front of a Slurm."""

    def __init__(self, lab: Lab, root: Path) -> None:
        kept = {k: v for k, v in environment(lab.paths).items() if not k.startswith("HPCTK_")}
        self.environ = {**kept, "XDG_CONFIG_HOME": str(root / "config")}
        self.root = root

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, cwd=self.root, env=self.environ, text=True, capture_output=True, check=False
        )

    def hpctk(self, *argv: str) -> subprocess.CompletedProcess[str]:
        done = self.run(sys.executable, "-m", "hpc_toolkit", *argv)
        assert done.returncode == 0, done.stderr
        return done

    def init(self, name: str) -> str:
        """The path of a drafted file."""
        return self.hpctk("cluster", "init", name, "--from-slurm").stdout.strip()

    def accepted(self, script: str) -> str:
        """What sbatch says to a script that it does not submit."""
        done = self.run("sbatch", "--test-only", script)
        assert done.returncode == 0, done.stderr
        return done.stderr


@pytest.fixture
def site(lab: LabUnderTest, tmp_path: Path) -> Site:
    return Site(lab.lab, tmp_path)


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A Slurm of two nodes without GPUs."""
    root = tmp_path_factory.mktemp("small")
    lab = Lab(lab_paths("small", root / "lab"))
    lab.up(LabSettings(nodes=2, gpus_per_node=0))
    try:
        yield Site(lab, root)
    finally:
        lab.down()


def test_a_drafted_file_says_what_the_builtin_file_of_the_lab_says(site: Site) -> None:
    drafted, builtin = load_cluster(site.init("mine")), load_cluster("lab")

    for fact in (
        *("nodes", "gpus_per_node", "gpu_type", "gpu_request", "cpus_per_node"),
        *("mem_per_node_mib", "max_walltime_s", "max_array_size", "shrink_jobs", "mem_style"),
        *("identify", "partitions", "account_required"),
    ):
        assert getattr(drafted, fact) == getattr(builtin, fact), fact
    assert not drafted.verified
    assert drafted.source == "hpctk cluster init mine --from-slurm"


def test_a_drafted_file_is_valid_and_not_overwritten(site: Site) -> None:
    path = site.init("mine")

    assert site.hpctk("cluster", "validate", path, "mine").stdout == f"{path}: ok\n{path}: ok\n"
    again = site.run(sys.executable, "-m", "hpc_toolkit", "cluster", "init", "mine", "--from-slurm")
    assert again.returncode == 1
    assert "the file exists" in again.stderr


def test_a_script_for_a_drafted_cluster_is_accepted_and_names_its_partition(site: Site) -> None:
    site.init("mine")

    done = site.hpctk("render", "--nodes", "8", "--gpus-per-node", "4", "--cluster", "mine")

    script = Path(site.root, done.stdout.strip())
    assert "#SBATCH --partition=main\n" in script.read_text(encoding="utf-8")
    assert "n[1-8]" in site.accepted(str(script))


def test_a_drafted_cluster_is_recognized_by_the_slurm_in_reach(site: Site) -> None:
    assert "cluster lab, recognized by" in site.hpctk("render", "-o", "-").stderr

    path = site.init("mine")

    said = site.hpctk("render", "-o", "-").stderr
    assert f"cluster mine, recognized by {path}: identify.slurm_cluster = hpctklab" in said


def test_a_limit_of_a_drafted_cluster_is_refused_with_its_file(site: Site) -> None:
    path = site.init("mine")

    argv = ("render", "--nodes", "9", "--cluster", "mine", "-o", "-")
    done = site.run(sys.executable, "-m", "hpc_toolkit", *argv)

    assert done.returncode == 1
    assert path in done.stderr


def test_a_slurm_without_gpus_is_drafted_and_takes_its_scripts(small: Site) -> None:
    drafted = load_cluster(small.init("small"))

    assert (drafted.nodes, drafted.gpus_per_node, drafted.gpu_type) == (2, 0, None)
    done = small.hpctk(
        *("render", "--cluster", "small", "--nodes", "2", "--ntasks-per-node", "8"),
        *("--cpus-per-task", "4"),
    )
    assert "n[1-2]" in small.accepted(done.stdout.strip())
