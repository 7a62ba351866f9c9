"""What scontrol is asked about nodes, jobs and limits, and what it is told."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.slurm.client import ASK_S, SUBMIT_S, SlurmError, ask, failure, run
from hpc_toolkit.slurm.records import UNKNOWN, NodeRecord, job_id, parse_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def node_states(names: Iterable[str], *, timeout_s: float = ASK_S) -> dict[str, NodeRecord]:
    """One record for every name; ``unknown`` for nodes of which Slurm says nothing. Never raises.

    ``names`` are single names, not lists in brackets.
    """
    wanted = [name for name in dict.fromkeys(names) if re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)]
    found: dict[str, NodeRecord] = {}
    if wanted:
        argv = ["scontrol", "--oneliner", "show", "node", ",".join(wanted)]
        try:
            # A name that does not exist is an error, and the others are listed all the same.
            found = parse_nodes(run(argv, timeout_s=timeout_s).stdout)
        except SlurmError:
            found = {}
    return {name: found.get(name) or NodeRecord(name=name, state=UNKNOWN) for name in names}


def host_names(nodes: str, *, timeout_s: float = ASK_S) -> list[str]:
    """The names in a list such as ``n[1-3,5]``; no controller is asked.

    Raises:
        SlurmError: it is no list, or scontrol is missing.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.,\[\]-]*", nodes):
        return []
    return ask(["scontrol", "show", "hostnames", nodes], timeout_s=timeout_s).split()


def scontrol_show_job(wanted: str, *, timeout_s: float = ASK_S) -> list[dict[str, str]]:
    """What the controller knows of a job, one mapping for each element of an array.

    Values that hold spaces are cut at the first one, but for those of ``StdOut``, ``StdErr`` and
    ``WorkDir``.

    Raises:
        SlurmError: no answer, or the job is gone.
    """
    checked = wanted if job_id(wanted) else "0"
    text = ask(["scontrol", "show", "job", checked], timeout_s=timeout_s)
    jobs: list[dict[str, str]] = []
    for block in re.split(r"\n\s*\n", text):
        values = dict(re.findall(r"(?:^|\s)([\w/:]+)=(\S*)", block))
        for name in ("StdOut", "StdErr", "WorkDir", "Command"):
            if line := re.search(rf"^\s*{name}=(.*)$", block, re.MULTILINE):
                values[name] = line[1]
        if "JobId" in values:
            jobs.append(values)
    return jobs


def job_nodes(job: str, *, timeout_s: float = ASK_S) -> list[str]:
    """The nodes that a job has now, without those that it has lost; [] for one without nodes.

    ``job`` is a raw id: that of an array's element, not of the array.

    Raises:
        SlurmError: no answer, or the job is gone.
    """
    argv = ["squeue", "--noheader", f"--jobs={job}", "--format=%A %N"]
    # The raw id of an array's last element is also the array's, and lists every element.
    rows = [line.split() for line in ask(argv, timeout_s=timeout_s).splitlines()]
    listed = next((row[1] for row in rows if row[0] == job and len(row) > 1), "")
    return host_names(listed, timeout_s=timeout_s)


def set_nodes(job: str, nodes: Sequence[str], *, timeout_s: float = SUBMIT_S) -> None:
    """Have Slurm take all other nodes from a running job (scontrol(1), NodeList).

    Raises:
        SlurmError: no answer, or it refuses.
    """
    argv = ["scontrol", "update", f"JobId={job}", f"NodeList={','.join(nodes)}"]
    # scontrol leaves scripts for resetting a shell's variables where it is called.
    with tempfile.TemporaryDirectory() as elsewhere:
        done = run(argv, timeout_s=timeout_s, cwd=Path(elsewhere))
    if done.code:
        raise failure(argv, done)


def max_array_size(*, timeout_s: float = ASK_S) -> int | None:
    """Slurm's MaxArraySize: the highest index of an array is one less; None if it does not say.

    Raises:
        SlurmError: no answer.
    """
    text = ask(["scontrol", "show", "config"], timeout_s=timeout_s)
    match = re.search(r"^MaxArraySize\s*=\s*([0-9]+)", text, re.MULTILINE)
    return int(match[1]) if match else None
