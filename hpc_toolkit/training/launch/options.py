"""The options of torch.distributed's launcher, defined once for the command line and Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.system.options import Option, by_name, flag

if TYPE_CHECKING:
    from hpc_toolkit.system.options import Panels


PANELS: Panels = {
    "Ranks": (
        Option(
            "nproc_per_node",
            "Ranks on this node: a number, gpu, cpu or auto. [default: one per GPU in Slurm, "
            "else 1]",
            "N|KIND",
        ),
        Option("nnodes", "Number of nodes, or MIN:MAX with c10d. [default: 1]", "N[:MAX]"),
        Option("node_rank", "Rank of this node, from 0.", "N"),
        flag("module", "Treat SCRIPT as a module, like 'python -m'.", short="-m"),
        flag("no_python", "Treat SCRIPT as a program, not as Python."),
        flag("run_path", "Run SCRIPT with runpy in the agent's child processes.", hidden=True),
        Option("role", "Name of these ranks in logs and events.", "TEXT", hidden=True),
        Option("numa_binding", "Bind each rank to its GPU's CPUs: node, socket ...", "MODE"),
        flag("virtual_local_rank", "Show each rank only its GPU, as local rank 0.", hidden=True),
        Option(
            "start_method",
            "How --run-path starts processes: spawn, fork ...",
            "METHOD",
            hidden=True,
        ),
    ),
    "Rendezvous": (
        Option("master_addr", "Address of node 0. [default: read from --run-dir]", "HOST"),
        Option("master_port", "Port of node 0. [default: 29500 with an address]", "N"),
        Option("local_addr", "Address of this node.", "HOST", hidden=True),
        flag("standalone", "Run on this node only; the default.", hidden=True),
        Option("rdzv_backend", "Use torch's rendezvous: c10d, static or etcd.", "NAME"),
        Option("rdzv_endpoint", "Address of torch's rendezvous.", "HOST:PORT"),
        Option("rdzv_id", "Unique name of this launch; the same on all nodes.", "ID"),
        Option("rdzv_conf", "More settings of torch: KEY=VALUE,KEY=VALUE.", "LIST", hidden=True),
    ),
    "Failures and signals": (
        Option(
            "max_restarts", "Restart all ranks up to N times after one fails. [default: 0]", "N"
        ),
        Option(
            "monitor_interval",
            "Time between checks of the ranks. [default: 100ms]",
            "DURATION",
            hidden=True,
        ),
        Option(
            "shutdown_timeout",
            "Time for ranks to exit before they are killed. [default: 30s]",
            "DURATION",
        ),
        Option(
            "signals_to_handle",
            "Signals that end all ranks. [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT]",
            "LIST",
            hidden=True,
        ),
        Option(
            "event_log_handler", "Handler of torch's events: null or console.", "NAME", hidden=True
        ),
    ),
    "Output": (
        Option("log_dir", "Directory of the ranks' logs. [default: logs/ in --run-dir]", "DIR"),
        Option(
            "redirects",
            "Write output to files only: 1 stdout, 2 stderr, 3 both, or 0:3,1:1.",
            "WHAT",
            short="-r",
        ),
        Option(
            "tee",
            "Write output to files and the terminal; values as above. [default: 3]",
            "WHAT",
            short="-t",
        ),
        Option("local_ranks_filter", "Show only the output of these local ranks.", "LIST"),
        Option(
            "duplicate_stdout_filters",
            "Copy lines of stdout with these words.",
            "LIST",
            hidden=True,
        ),
        Option(
            "duplicate_stderr_filters",
            "Copy lines of stderr with these words.",
            "LIST",
            hidden=True,
        ),
        Option(
            "logs_specs", "Name of an installed torchrun.logs_specs plugin.", "NAME", hidden=True
        ),
    ),
}
"""Every option of torchrun under its longest spelling, grouped by panel of the help."""


def all_options() -> dict[str, Option]:
    """Return every option by its name."""
    return by_name(PANELS)
