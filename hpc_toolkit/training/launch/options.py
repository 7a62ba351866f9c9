"""The options of ``hpctk launch`` that torchrun has as well, for the command line and Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.system.options import Option, by_name, flag

if TYPE_CHECKING:
    from hpc_toolkit.system.options import Panels


PANELS: Panels = {
    "Ranks": (
        Option(
            "nproc_per_node", "N, gpu, cpu or auto. [default: 1; one per GPU in Slurm]", "N|KIND"
        ),
        Option("nnodes", "Number of nodes. [default: 1]", "N"),
        Option("node_rank", "Rank of this node, from 0.", "N"),
        flag("module", "Treat SCRIPT as a module, like 'python -m'.", short="-m"),
        flag("no_python", "Treat SCRIPT as a program, not as Python."),
        Option("numa_binding", "node: bind each rank to the CPUs near its GPU.", "MODE"),
    ),
    "Rendezvous": (
        Option("master_addr", "Address of node 0. [default: read from --run-dir]", "HOST"),
        Option("master_port", "Port of node 0. [default: 29500 with an address]", "N"),
        Option("local_addr", "Address of this node.", "HOST", hidden=True),
        flag("standalone", "Run on this node only; the default.", hidden=True),
        Option("rdzv_id", "Unique name of this launch; the same on all nodes.", "ID"),
    ),
    "Failures and signals": (
        Option("max_restarts", "Restart all ranks up to N times. [default: 0]", "N"),
        Option("shutdown_timeout", "Time for ranks to exit. [default: 30s]", "DURATION"),
    ),
    "Output": (
        Option("log_dir", "Directory of the ranks' logs. [default: logs/ in --run-dir]", "DIR"),
        Option("redirects", "Write to files: 1 stdout, 2 stderr, 3 both.", "0-3", short="-r"),
        Option("tee", "Write to files and the terminal. [default: 3]", "0-3", short="-t"),
        Option("local_ranks_filter", "Show only the output of these local ranks: 0,3.", "LIST"),
    ),
}
"""Options by panel of the help; each has torchrun's longest spelling."""


def all_options() -> dict[str, Option]:
    """Return every option by its name."""
    return by_name(PANELS)
