"""A real Slurm for the tests: a lab of their own, and what they ask of it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from hpc_toolkit.lab import Lab
from hpc_toolkit.lab.commands import environment, install_command, missing_programs
from hpc_toolkit.lab.daemons import NamespaceError
from hpc_toolkit.lab.settings import LabSettings, lab_paths, slurm_conf
from hpc_toolkit.lab.state import Member, kill_members, members
from hpc_toolkit.slurm.records import SQUEUE_FIELDS, JobRecord, parse_squeue
from tests.integration.realrun import HANG_S

SETTINGS = LabSettings(nodes=8, gpus_per_node=4)
# Variables of whoever runs the tests that the programs under test would obey.
_FOREIGN = ("HPCTK_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "CUDA_VISIBLE_DEVICES")

# What a lab consists of, as the kernel has the names; everything else belongs to jobs.
_DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmdbd", "mariadbd"}
# Step daemons tidy up after their job has ended for Slurm.
_LEAVING_S = 120.0
LOOK_S = 0.2
"""Between two looks at what is waited for: each starts a program of Slurm."""


class LabUnderTest:
    """A lab in a directory, with the commands of Slurm pointed at it."""

    def __init__(
        self,
        directory: Path,
        settings: LabSettings = SETTINGS,
        *,
        edit: Callable[[str], str] = str,
    ) -> None:
        """``edit`` is what a site makes of slurm.conf. In a ``with`` block the lab is up."""
        self.settings, self._edit = settings, edit
        self.lab = Lab(lab_paths("lab", directory))

    @property
    def directory(self) -> Path:
        return self.lab.paths.root

    @property
    def slurm_conf(self) -> Path:
        return self.lab.paths.slurm_conf

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.settings.node_names

    @property
    def env(self) -> dict[str, str]:
        """This environment less what speaks of another Slurm, with the lab's SLURM_CONF."""
        own = environment(self.lab.paths)
        return {key: text for key, text in own.items() if not key.startswith(_FOREIGN)}

    def up(self) -> None:
        """Start it; skip the test if this machine does not make such a lab."""
        if missing := missing_programs(accounting=self.settings.accounting):
            pytest.skip(f"no such lab here: {install_command(missing)}")

        def edited(*given: Any, **more: Any) -> str:
            return self._edit(slurm_conf(*given, **more))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hpc_toolkit.lab.slurm_conf", edited)
            try:
                self.lab.up(self.settings)
            except NamespaceError as error:
                pytest.skip(error.message)
        self._conf = self.slurm_conf.read_text()

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def configure(self, **keys: object) -> None:
        """Give keys of slurm.conf(5) other values, until the lab is cleared."""
        text = self._conf
        for key, value in keys.items():
            text, found = re.subn(rf"(?m)^{key}=.*$", f"{key}={value}", text)
            assert found == 1, f"{key} is {found} times in {self.slurm_conf}"
        if self.slurm_conf.read_text() != text:
            self.slurm_conf.write_text(text)
            self.scontrol("reconfigure")

    def down(self) -> None:
        self.lab.down()

    def run(
        self,
        *argv: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        check: bool = True,
        timeout_s: float = HANG_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that speaks with the lab; ``env`` is added to its environment."""
        done = subprocess.run(
            [str(word) for word in argv],
            cwd=cwd,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if check:
            assert done.returncode == 0, f"{argv}: exit {done.returncode}: {done.stderr}"
        return done

    def sbatch(
        self, *argv: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> str:
        """Submit; the job's id."""
        return self.run("sbatch", "--parsable", *argv, cwd=cwd, env=env).stdout.strip()

    def preempt(self, *options: str) -> str:
        """A short job that takes all nodes from others, or those that ``options`` name; its id."""
        urgent = ("--partition=urgent", "--nodes=8", "--exclusive", "--mem=0", "--time=1")
        return self.sbatch(*urgent, "--output=/dev/null", "--wrap=true", *options)

    def scontrol(self, *argv: str) -> str:
        return self.run("scontrol", *argv).stdout

    def records(self, job: str) -> list[JobRecord]:
        """What Slurm knows of a job, one record per task of an array."""
        argv = ("squeue", "--noheader", "--array", "--states=all", "--jobs", job, "--Format")
        columns = ",".join(f"{name}:{width}" for name, width in SQUEUE_FIELDS)
        records = parse_squeue(self.run(*argv, columns).stdout.encode())
        assert records, f"squeue does not list job {job}"
        return records

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED ...; of the first task of an array."""
        return self.records(job)[0].state

    def wait_for(self, job: str, *states: str, timeout_s: float = HANG_S) -> JobRecord:
        """The job once it is in one of ``states``; without any, once it has ended for good.

        Fails at once when the job ended otherwise: what it waits for cannot come any more.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            record = self.records(job)[0]
            if record.state in states or (record.ended and not states):
                return record
            over = record.ended or time.monotonic() > deadline
            assert not over, f"job {job} is {record.state}:\n{self.output(record)}"
            time.sleep(LOOK_S)

    def output(self, record: JobRecord) -> str:
        """What a job has written so far."""
        found = self.scontrol("show", "job", "--oneliner", record.id)
        pairs = re.findall(
            r" StdErr=(.*?) StdIn=.*? StdOut=(.*?)(?= [A-Z]\w*=|\s*$)", found, re.MULTILINE
        )
        logs = dict.fromkeys(Path(name) for err, out in pairs for name in (out, err) if name)
        return "".join(log.read_text(errors="replace") for log in logs if log.is_file())

    def strays(self) -> list[Member]:
        """Processes of the lab that are none of its daemons: those of jobs."""
        return [one for one in members(self.lab.paths.token) if one.name not in _DAEMONS]

    def check_no_strays(self, *, forgive: str = "") -> None:
        """Fail if jobs leave processes behind; those are killed for the sake of the next test.

        Those called ``forgive`` are killed at once, and are no failure.
        """
        for one in self.strays():
            if one.name == forgive:
                kill_members(self.lab.paths.token, one.node, name=one.name)
        deadline = time.monotonic() + _LEAVING_S
        while strays := self.strays():
            if time.monotonic() > deadline:
                for one in strays:
                    kill_members(self.lab.paths.token, one.node, name=one.name)
                named = ", ".join(f"{one.name} ({one.pid}) on {one.node}" for one in strays)
                message = f"jobs have left processes behind: {named}"
                raise AssertionError(message)
            time.sleep(LOOK_S)

    def _end_waiting_steps(self) -> None:
        """End what waits for a node that is gone, which takes a minute, when no task is left."""
        strays = self.strays()
        if {one.name for one in strays} <= {"srun", "slurmstepd"}:
            for one in strays:
                kill_members(self.lab.paths.token, one.node, name=one.name)

    def clear(self) -> None:
        """End all jobs and bring all nodes back: the next test finds the lab as it was.

        Fails if a job leaves a process behind.
        """
        if self.lab.status().state != "up":
            self.up()
            return
        everything = ("--user", str(os.geteuid()))
        # Jobs that ignore SIGTERM would take KillWait, 30 s.
        self.run("scancel", "--full", "--signal=KILL", *everything)
        self.run("scancel", *everything)
        self.configure()
        crashed = self.lab.status().crashed
        for node in crashed:
            self.lab.restore(node)
        deadline = time.monotonic() + HANG_S
        while (text := self.run("sinfo", "-hN", "-p", "main", "-o", "%T").stdout.split()) != [
            "idle"
        ] * len(self.nodes):
            assert time.monotonic() < deadline, f"nodes are not idle: {text}"
            if any("down" in state or "drain" in state for state in text):
                self.run("scontrol", "update", f"nodename={','.join(self.nodes)}", "state=resume",
                         check=False)  # fmt: skip
            if crashed:
                self._end_waiting_steps()
            time.sleep(LOOK_S)
        # The srun of a step goes on waiting for a node whose slurmd was killed.
        self.check_no_strays(forgive="srun" if crashed else "")
