"""Query nodes, jobs and limits with scontrol and squeue, and shrink running jobs.

Functions raise SlurmError if Slurm does not answer or refuses, unless they say otherwise.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.slurm.client import ASK_S, PATIENCE_S, SlurmError, answer, ask
from hpc_toolkit.slurm.records import UNKNOWN, NodeRecord, job_id, parse_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SETTING = re.compile(r"([A-Za-z][\w\[\]]*)\s+= (.*)")


def node_states(names: Iterable[str], *, timeout_s: float = ASK_S) -> dict[str, NodeRecord]:
    """Return one record for every name; ``unknown`` for nodes that Slurm does not list.

    ``names`` are single names, not lists in brackets. A failing Slurm raises nothing.
    """
    wanted = [name for name in dict.fromkeys(names) if re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)]
    found: dict[str, NodeRecord] = {}
    if wanted:
        argv = ["scontrol", "--oneliner", "show", "node", ",".join(wanted)]
        try:
            # scontrol fails if one name does not exist, but still lists the others.
            found = parse_nodes(answer(argv, timeout_s=timeout_s).stdout)
        except SlurmError:
            found = {}
    return {name: found.get(name) or NodeRecord(name=name, state=UNKNOWN) for name in names}


def host_names(nodes: str, *, timeout_s: float = ASK_S) -> list[str]:
    """Expand a host list such as ``n[1-3,5]``; [] for text with other characters.

    Runs scontrol, which asks no controller for this.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.,\[\]-]*", nodes):
        return []
    return ask(["scontrol", "show", "hostnames", nodes], timeout_s=timeout_s).split()


def job_outputs(wanted: str) -> list[str]:
    """Return the logs of a job, or of the elements of an array, as ``scontrol show job`` says."""
    text = ask(["scontrol", "show", "job", wanted if job_id(wanted) else "0"])
    return re.findall(r"^\s*StdOut=(.+)$", text, re.MULTILINE)


def job_nodes(job: str) -> list[str]:
    """Return the nodes that a job has now, without lost ones; [] for a job without nodes.

    ``job`` is a raw id: for an array the id of one element, not of the array.
    """
    argv = ["squeue", "--noheader", f"--jobs={job}", "--format=%A %N"]
    # An array's last element has the id of the array as its raw id, so squeue lists all elements.
    rows = [line.split() for line in ask(argv).splitlines()]
    return host_names(next((row[1] for row in rows if row[0] == job and len(row) > 1), ""))


def set_nodes(job: str, nodes: Sequence[str]) -> None:
    """Shrink a running job to ``nodes`` (scontrol(1), NodeList)."""
    argv = ["scontrol", "update", f"JobId={job}", f"NodeList={','.join(nodes)}"]
    # scontrol writes scripts that reset a shell's variables into its working directory.
    with tempfile.TemporaryDirectory() as elsewhere:
        ask(argv, timeout_s=PATIENCE_S, cwd=Path(elsewhere))


def slurm_config(*, timeout_s: float = ASK_S) -> dict[str, str]:
    return parse_config(ask(["scontrol", "show", "config"], timeout_s=timeout_s))


def parse_config(text: str) -> dict[str, str]:
    found = map(_SETTING.fullmatch, text.splitlines())
    return {match[1]: match[2].strip() for match in found if match}
