"""What jobs meet on a lab is what they would meet on a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_toolkit.lab.daemons import Host, start_slurmd
from hpc_toolkit.lab.settings import LabSettings
from hpc_toolkit.lab.state import members, read_record
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import wait_until

SHOW_GPUS = "srun bash -c 'echo $SLURM_PROCID $(hostname) ${CUDA_VISIBLE_DEVICES:-none}'"


def script(directory: Path, text: str, *directives: str) -> Path:
    """A job script that writes to a log in its directory."""
    path = directory / "job.sh"
    head = "".join(f"#SBATCH {one}\n" for one in (f"--output={directory}/%j.log", *directives))
    path.write_text(f"#!/bin/bash\n{head}{text}\n")
    return path


def printed(lab: LabUnderTest, path: Path, *words: str) -> list[str]:
    """The sorted lines of a job that must succeed."""
    record = lab.wait_for(lab.sbatch(path, *words, cwd=path.parent))
    assert record.state == "COMPLETED", lab.output(record)
    return sorted(lab.output(record).splitlines(), key=lambda line: int(line.split()[0]))


def on_node(lab: LabUnderTest, node: str) -> list[str]:
    """The names of a node's processes, without those of finished and starting tools."""
    return sorted(one.name for one in members(lab.lab.paths.token, node))


def hpctk(lab: LabUnderTest, command: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hpc_toolkit", "lab", command, "--dir", str(lab.directory)]
    return lab.run(*argv, *words, check=False)


def test_jobs_of_one_node_share_its_gpus_out(lab: LabUnderTest, tmp_path: Path) -> None:
    job = script(tmp_path, f"{SHOW_GPUS}; sleep 1.5", "--nodelist=n1", "--gpus=l40s:2", "--mem=1G")
    first, second = (lab.sbatch(job, cwd=tmp_path) for _ in range(2))
    for one in (first, second):
        lab.wait_for(one, "RUNNING")

    seen = [lab.output(lab.wait_for(one)).split()[-1] for one in (first, second)]

    assert sorted(seen) == ["0,1", "2,3"]


def test_a_job_sees_its_nodes_names_and_reaches_them_by_these(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    text = "srun bash -c 'echo $SLURM_PROCID $(hostname) $(getent hosts n7 | cut -d\" \" -f1)'"

    assert printed(lab, script(tmp_path, text, "--nodes=3")) == [
        *("0 n1 127.0.0.1", "1 n2 127.0.0.1", "2 n3 127.0.0.1")
    ]


def test_daemons_have_nothing_of_the_shell_that_started_them(lab: LabUnderTest) -> None:
    """Or a lab would behave differently for whoever started it, and keep what they had secret."""
    found = members(lab.lab.paths.token)
    assert {"munged", "slurmctld", "slurmd"} <= {one.name for one in found}
    for one in found:
        variables = Path(f"/proc/{one.pid}/environ").read_text().split("\0")
        names = {text.partition("=")[0] for text in variables if text}
        known = {"PATH", "PWD", "LC_ALL", "SLURM_CONF", "MYSQL_UNIX_PORT"}
        assert not {name for name in names - known if not name.startswith("SLURM")}, one.name


@pytest.mark.newslurm
def test_a_lab_is_up_while_its_daemons_read_their_configuration_again(lab: LabUnderTest) -> None:
    """Slurm 23.11 and newer replace each daemon by a new process then."""
    seen = []
    for _ in range(4):
        with subprocess.Popen(["scontrol", "reconfigure"], env=lab.env) as reconfigure:
            looks = 0
            while reconfigure.poll() is None or looks < 8:
                now = lab.lab.status()
                seen.append((now.state, now.gone))
                looks += reconfigure.poll() is not None

    assert set(seen) == {("up", ())}


@pytest.mark.slow
def test_an_urgent_job_preempts_and_the_other_starts_again_in_seconds(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    patient = script(tmp_path, "echo run ${SLURM_RESTART_COUNT:-0}; sleep 100", "--nodes=8",
                     "--exclusive", "--requeue", "--open-mode=append")  # fmt: skip
    first = lab.sbatch(patient, cwd=tmp_path)
    lab.wait_for(first, "RUNNING")

    urgent = lab.preempt()

    assert lab.wait_for(urgent).state == "COMPLETED"
    began = time.monotonic()
    record = lab.wait_for(first, "RUNNING")
    assert time.monotonic() - began < 100, "Slurm's own wait is two minutes"
    wait_until(lambda: "run 1" in lab.output(record), "the second start's output")


class TestCrash:
    @pytest.fixture
    def job(self, lab: LabUnderTest, tmp_path: Path) -> str:
        """A job on n1 to n3, whose step survives a lost node."""
        text = f"""
srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c '
  while sleep 0.1; do echo . >>{tmp_path}/$(hostname); done'
"""
        job = lab.sbatch(
            script(tmp_path, text, "--nodes=3", "--nodelist=n[1-3]", "--no-kill"), cwd=tmp_path
        )
        for node in ("n1", "n2", "n3"):
            self.wait_for_dots(tmp_path / node)
        return job

    @staticmethod
    def wait_for_dots(path: Path, more: int = 2) -> None:
        """Wait until the task of a node has written again."""
        before = path.stat().st_size if path.exists() else 0
        wait_until(
            lambda: path.exists() and path.stat().st_size >= before + 2 * more, f"{path} to grow"
        )

    def test_a_crashed_node_is_down_and_empty_and_the_others_work_on(
        self, lab: LabUnderTest, job: str, tmp_path: Path
    ) -> None:
        assert {"slurmd", "slurmstepd", "bash"} <= set(on_node(lab, "n3"))

        done = hpctk(lab, "crash", "n3")

        assert done.returncode == 0, done.stderr
        assert on_node(lab, "n3") == []
        told = lab.run("sinfo", "-hN", "-p", "main", "-n", "n3", "-o", "%T|%E").stdout.strip()
        assert told == "down|hpctk lab crash"
        silent = (tmp_path / "n3").stat().st_size
        self.wait_for_dots(tmp_path / "n1")
        self.wait_for_dots(tmp_path / "n2")
        assert (tmp_path / "n3").stat().st_size == silent
        assert lab.state(job) == "RUNNING"
        now = lab.lab.status()
        assert (now.state, now.crashed, now.gone) == ("up", ("n3",), ())

        assert hpctk(lab, "restore", "n3").stdout == "n3: back\n"

        assert lab.lab.status().crashed == ()
        assert lab.run("sinfo", "-hN", "-p", "main", "-n", "n3", "-o", "%T").stdout == "idle\n"

    @pytest.mark.newslurm
    def test_a_crashed_node_stays_down_when_slurm_hears_from_it_late(
        self, lab: LabUnderTest
    ) -> None:
        """slurmctld can process a reply up to 2 s after the node that sent it was killed."""

        def slurmd_start() -> int:
            shown = lab.run(
                "scontrol", "show", "node", "n3", env={"SLURM_TIME_FORMAT": "%s"}
            ).stdout
            return int(shown.partition("SlurmdStartTime=")[2].split()[0])

        before = slurmd_start()
        wait_until(lambda: time.time() >= before + 1, "another second")
        lab.lab.crash("n3")
        record = read_record(lab.lab.paths)
        assert record is not None

        start_slurmd(Host(lab.lab.paths, record.start, "n3")).wait()
        wait_until(lambda: slurmd_start() > before, "the registration of n3")

        assert lab.run("sinfo", "-hN", "-p", "main", "-n", "n3", "-o", "%T").stdout == "down\n"
        lab.lab.restore("n3")
        assert lab.run("sinfo", "-hN", "-p", "main", "-n", "n3", "-o", "%T").stdout == "idle\n"

    def test_a_node_without_its_slurmd_works_on(
        self, lab: LabUnderTest, job: str, tmp_path: Path
    ) -> None:
        before = on_node(lab, "n3")

        done = hpctk(lab, "crash", "n3", "--daemon-only")

        assert done.stdout == "n3: 1 process killed\n"
        after = on_node(lab, "n3")
        assert "slurmd" not in after
        # The task calls sleep again and again, so one look can miss it.
        assert {"slurmstepd", "bash"} <= set(after) <= {*before, "sleep"}
        self.wait_for_dots(tmp_path / "n3")
        assert lab.state(job) == "RUNNING"


def elsewhere(lab: LabUnderTest, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """``hpctk lab`` on a machine whose name means its address on the network."""
    return lab.run(
        *("unshare", "--mount", "--uts", "sh", "-c"),
        'hostname elsewhere; echo 192.0.2.77 elsewhere >"$0"; mount --bind "$0" /etc/hosts; "$@"',
        lab.directory.parent / "elsewhere",
        *(sys.executable, "-m", "hpc_toolkit", "lab", *words),
        check=False,
    )


def test_exec_runs_an_interactive_srun_where_the_machines_name_is_no_loopback(
    lab: LabUnderTest,
) -> None:
    """srun would listen at the machine's address, where no node reaches it."""
    srun = ("srun", "-N2", "sh", "-c", "hostname; exit 5")

    done = elsewhere(lab, "exec", "--dir", lab.directory, *srun)

    assert (done.returncode, sorted(done.stdout.split())) == (5, ["n1", "n2"])


def test_env_says_when_srun_needs_exec(lab: LabUnderTest) -> None:
    done = elsewhere(lab, "env", "--dir", lab.directory)

    assert done.stdout == f"export SLURM_CONF={lab.slurm_conf}\n"
    assert "this machine's name resolves to 192.0.2.77" in done.stderr
    assert f"hpctk lab exec --dir {lab.directory}" in done.stderr


@pytest.fixture(scope="module")
def counted(lab_directory: Path) -> Iterator[LabUnderTest]:
    """A lab with accounting."""
    others = Path(tempfile.gettempdir(), f"#sql-temptable-of-another-server-{os.getpid()}.MAI")
    others.touch()
    with LabUnderTest(lab_directory / "counted", LabSettings(2, 2, accounting=True)) as started:
        assert others.exists(), "the lab's database deleted temporary tables of another server"
        others.unlink()
        yield started


@pytest.mark.slow
def test_sacct_tells_of_jobs_that_ended(counted: LabUnderTest, tmp_path: Path) -> None:
    done = counted.wait_for(counted.sbatch(script(tmp_path, "exit 3"), cwd=tmp_path))
    argv = ("sacct", "-nPX", "-j", done.id, "-o", "jobid,state,exitcode")

    # slurmctld tells slurmdbd of new jobs every 5 s.
    wait_until(lambda: "FAILED" in counted.run(*argv).stdout, lambda: counted.run(*argv).stdout)

    assert counted.run(*argv).stdout == f"{done.id}|FAILED|3:0\n"
