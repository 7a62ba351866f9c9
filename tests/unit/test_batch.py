"""The batch process of a job: what it reads from its script, and what its environment becomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hpc_toolkit.slurm.batch import job
from hpc_toolkit.slurm.batch.job import clean_environment
from hpc_toolkit.slurm.client import Finished
from hpc_toolkit.slurm.records import script_options


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("#SBATCH --nodes=2", {"nodes": "2"}),
        ("#SBATCH --nodes 2 --no-kill -c4", {"nodes": "2", "no-kill": "", "cpus-per-task": "4"}),
        ("#SBATCH -c 4  # four", {"cpus-per-task": "4"}),
        ('#SBATCH --comment="a \\"b\\" --mem=4G"', {"comment": 'a "b" --mem=4G'}),
        ("#SBATCH --comment='open", {"comment": "'open"}),
        ("#SBATCH\t--signal=B:USR1@60", {"signal": "B:USR1@60"}),
        ("#SBATCH -J mine -o out/%j.log", {"job-name": "mine", "output": "out/%j.log"}),
        ("echo <<end\n#SBATCH --mem=4G\nend", {}),
        (" #SBATCH --mem=4G", {}),
        ("##SBATCH --mem=4G", {}),
    ],
)
def test_the_options_of_an_edited_script_are_read(line: str, found: dict[str, str]) -> None:
    assert script_options(f"#!/bin/bash\n\n{line}\n") == found


def test_variables_of_an_outer_job_are_removed_and_those_of_the_options_kept() -> None:
    environ = dict.fromkeys(("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_STEP_ID"), "1")
    environ |= {"SLURM_CPU_BIND_LIST": "0x1", "SLURM_JOB_ID": "17", "PYTHONUNBUFFERED": "0"}

    clean_environment(environ, {"mem-per-cpu": "4G"})

    assert environ == {
        "SLURM_MEM_PER_CPU": "1",
        "SLURM_JOB_ID": "17",
        "SLURM_EXPORT_ENV": "ALL",
        "PYTHONUNBUFFERED": "0",
    }


@pytest.mark.parametrize(("rank", "kept"), [({"RANK": "3"}, set()), ({}, {"MASTER_PORT"})])
def test_variables_of_a_rank_that_called_sbatch_are_removed_and_those_of_a_script_kept(
    rank: dict[str, str], kept: set[str]
) -> None:
    environ = {"MASTER_PORT": "29500", **rank}

    clean_environment(environ, {})

    assert environ.keys() == {"SLURM_EXPORT_ENV", "PYTHONUNBUFFERED", *kept}


@pytest.mark.parametrize(
    ("start", "lead", "noted", "warned"),
    [
        ("100", 300, False, True),
        ("100", 10, False, False),
        ("750", 300, False, False),  # the limit is shorter than the lead
        ("", 300, False, False),
        ("", 10, True, True),
    ],
)
def test_a_warning_that_came_too_early_for_python_is_known(
    monkeypatch: pytest.MonkeyPatch, start: str, lead: int, *, noted: bool, warned: bool
) -> None:
    monkeypatch.setattr("time.time", lambda: 800.0)
    environ = {"HPCTK_WARNED": "1"} if noted else {}

    assert job._was_warned(environ, {"signal": f"B:USR1@{lead}"}, start, 1000) is warned
    assert not environ


def test_a_directory_is_read_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = b"16|3|1|9|/other\n17|N/A|1|9|/d\xfc\nof two lines\n"
    monkeypatch.setattr(job, "answer", lambda *_, **__: Finished(0, "", "", listed))

    row = job._row("17")

    assert row is not None
    assert row["directory"] == os.fsdecode(b"/d\xfc\nof two lines")


# In a process of its own: a wakeup descriptor and handlers belong to the whole process.
QUEUE = """
import os, signal, subprocess
from hpc_toolkit.slurm.batch.step import Signals
signals = Signals()
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
found = [signals.next(5), signals.next(5), signals.next(0)]
child = subprocess.Popen(["bash", "-c", "kill -USR1 $$; exit 3"])
ended = signals.next(5)
print(*found, ended, child.wait())
"""


def test_signals_are_kept_in_order_and_children_have_the_default_actions() -> None:
    done = subprocess.run([sys.executable, "-c", QUEUE], capture_output=True, text=True, check=True)

    usr1, term, chld = signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD
    assert done.stdout.split() == [
        *(str(int(usr1)), str(int(term)), "None"),
        *(str(int(chld)), str(-int(usr1))),
    ]
