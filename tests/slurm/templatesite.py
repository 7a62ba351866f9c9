"""A directory in which a user calls hpctk and submits, and what tests ask about the jobs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import PROGRAMS, read_spec
from tests.integration.realrun import HANG_S
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import wait_until

ODD = "o'd d"
"""A run whose name needs quotes."""
SLEEP = "hpc_toolkit.science.workloads.synthetic:Sleep"


@dataclass
class Site:
    """A directory in which jobs are submitted, with the name of its run."""

    lab: LabUnderTest
    cwd: Path
    run: str = ODD
    environ: dict[str, str] = field(default_factory=dict)
    """What is added to the environment of hpctk."""

    def call(
        self, *words: str | Path, check: bool = True, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "hpc_toolkit", *words]
        return self.lab.run(*argv, cwd=self.cwd, env={**self.environ, **(env or {})}, check=check)

    def hpctk(self, *words: str | Path) -> str:
        return self.call(*words).stdout

    def status(self, run: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.hpctk("status", run or self.run, "--json"))
        return found

    def known_jobs(self, run: str = "") -> dict[str, Any]:
        """The jobs that the run's status shows, by their ids."""
        return {job["id"]: job for job in self.status(run)["jobs"]}

    def init(self, count: int = 4, seconds: float = 0.01, run: str = "") -> str:
        """Make a run of items that sleep; its name."""
        lines = [json.dumps({"item": number, "seconds": seconds}) for number in range(count)]
        (self.cwd / "items.jsonl").write_text("\n".join(lines), encoding="utf-8")
        self.hpctk("init", run or self.run, "--workload", SLEEP, "--items", "items.jsonl")
        return run or self.run

    def init_held(self, count: int, *words: str) -> None:
        """A run whose items wait for :meth:`release`, so that it cannot end before."""
        lines = [json.dumps({"item": number}) for number in range(count)]
        (self.cwd / "items.jsonl").write_text("\n".join(lines), encoding="utf-8")
        held = f": > {shlex.quote(str(self.cwd / 'held-'))}$SLURM_PROCID"
        wait = f"until [ -e {shlex.quote(str(self._go))} ]; do sleep 0.1; done"
        command = ("--command", f"{held}; {wait}")
        self.hpctk("init", self.run, *command, "--items", "items.jsonl", *words)

    def sent(self, *words: str | Path) -> list[str]:
        """The ids of what ``hpctk submit`` sends; it prints nothing else."""
        ids = self.hpctk("submit", *words).splitlines()
        assert all(re.fullmatch("[0-9]+", one) for one in ids), ids
        return ids

    def wait_for_held(self, ranks: int) -> None:
        """Wait until an item of each rank waits for :meth:`release`.

        A rank that is warned before its item has begun gives that item until the deadline.
        """
        wait_until(lambda: len(list(self.cwd.glob("held-*"))) >= ranks, f"items of {ranks} ranks")

    @property
    def _go(self) -> Path:
        return self.cwd / "go"

    def release(self) -> None:
        self._go.touch()

    def script(
        self, template: str = "work-queue", site: dict[str, Any] | None = None, **fields: Any
    ) -> Path:
        standard: dict[str, Any] = {"nodes": 2, "ntasks_per_node": 2, "mem": "200M", "time": "10"}
        standard |= {"python": sys.executable, "job_name": template, "output": "%j.out"}
        if template not in PROGRAMS:
            standard["run"] = self.run
        cluster = replace(load_cluster("generic"), **site or {})
        text = render_script(read_spec({**standard, **fields}), cluster, template)
        path = self.cwd / f"{template}.sbatch"
        path.write_text(text, encoding="utf-8")
        return path

    def submit(
        self,
        template: str = "work-queue",
        *options: str,
        shell: dict[str, str] | None = None,
        **fields: Any,
    ) -> str:
        """Render and submit from a shell with more variables; the job's number."""
        script = self.script(template, **fields)
        return self.lab.sbatch(*options, script, cwd=self.cwd, env=shell)

    def hosts_of(self, job: str) -> list[str]:
        """The nodes of a running job, in Slurm's order."""
        nodes = self.lab.run("squeue", "--noheader", "--format=%N", "--jobs", job).stdout.strip()
        return self.lab.run("scontrol", "show", "hostnames", nodes).stdout.split()

    def end_of(self, job: str, *, limit_s: float = HANG_S) -> tuple[str, int | None, int | None]:
        """State, exit code and restarts of a job that has ended."""
        record = self.lab.wait_for(job, timeout_s=limit_s)
        return record.state, record.exit_code, record.restarts

    def said(self, job: str) -> str:
        """What a job, or all elements of an array, have written so far."""
        logs = sorted(self.cwd.glob(f"{job}*.out"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def wait_for_text(self, job: str, text: str, *, times: int = 1) -> None:
        wait_until(
            lambda: self.said(job).count(text) >= times,
            lambda: f"{text!r} in:\n{self.said(job)}",
        )

    def wait_for_workers(self, number: int) -> None:
        found = Run.open(self.cwd / self.run)
        wait_until(lambda: found.status().workers.alive >= number, f"{number} workers")

    def hosts(self) -> list[str]:
        """Where the workers of the run were, one name each."""
        places = [read_presence(path) for path in (self.cwd / self.run / "workers").glob("*.json")]
        return [one.host for one in places if one is not None]

    def warn(self, job: str) -> None:
        """What Slurm does before the time limit (sbatch(1), --signal)."""
        self.lab.run("scancel", "--batch", "--signal=USR1", job)

    def warn_and_release(self, job: str) -> None:
        """Warn, and let the held items run once the job starts again for them."""
        self.warn(job)
        self.wait_for_text(job, "requeueing")
        self.release()

    def finished(self) -> dict[str, Any]:
        """The counts of the run, which must be whole: every item once, no attempt lost."""
        status = self.status()
        assert status["complete"]
        counts: dict[str, Any] = status["stages"]["items"]
        assert (counts["failed"], counts["retried"], counts["duplicates"]) == (0, 0, 0)
        return counts
