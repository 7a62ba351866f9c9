"""Stand-ins for Slurm's programs with the output of versions that are not installed."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from hpc_toolkit.slurm.records import SQUEUE_FIELDS
from hpc_toolkit.submit import own_login


def squeue_line(**cells: str) -> str:
    """Return a line of squeue, padded and cut to bytes as by --Format, even within a letter."""
    standard = {"JobID": "7", "ArrayJobID": "7", "JobArrayID": "7", "State": "RUNNING"}
    row = {name: "N/A" for name, _ in SQUEUE_FIELDS} | standard | cells
    columns = (row[name].encode().ljust(width)[:width] for name, width in SQUEUE_FIELDS)
    return b"".join(columns).decode("utf-8", "surrogateescape")


def pending_line(job: str = "7", **cells: str) -> str:
    """Return a line of squeue for a pending job called work-queue."""
    standard = {
        "State": "PENDING",
        "RestartCnt": "0",
        "SubmitTime": "1795250914",
        "Reason": "Priority",
        "NodeList": "",
        "Name": "work-queue",
        "UserName": own_login(),
        "exit_code": "0",
    }
    ids = {"JobID": job, "ArrayJobID": job, "JobArrayID": job}
    return squeue_line(**{**standard, **ids, **cells})


class Programs:
    """A test's scripts on a PATH of their own, without the programs of an installed Slurm."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        tools = root / "tools"
        tools.mkdir()
        for name in ("cat", "env", "sleep", "tr", "wc"):
            (tools / name).symlink_to(shutil.which(name) or "missing")
        monkeypatch.setenv("PATH", f"{root}:{tools}")
        for name in ("SLURM_JOB_ID", "SLURM_CONF", "SBATCH_ACCOUNT"):
            monkeypatch.delenv(name, raising=False)

    def add(self, name: str, script: str) -> None:
        """Add a program as a shell script."""
        path = self.root / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def answer(self, name: str, text: str, *, code: int = 0, stderr: str = "") -> None:
        """Add a program that always prints the same, and records its arguments."""
        said = f"cat >&2 <<'E'\n{stderr}\nE\n" if stderr else ""
        self.add(name, f'echo "$*" >> "$0.calls"\n{said}cat <<\'E\'\n{text}\nE\nexit {code}')

    def calls(self, name: str) -> list[str]:
        """Return the arguments of each call of a program that :meth:`answer` added."""
        path = self.root / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []
