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
            "Ranks on this node: a number, gpu, cpu or auto; by default 1, and inside Slurm one "
            "for each GPU of the node.",
            "N|KIND",
        ),
        Option("nnodes", "Nodes, or MIN:MAX of them with c10d; by default 1.", "N[:MAX]"),
        Option("node_rank", "The number of this node, from 0.", "N"),
        flag("module", "SCRIPT is a module, as for 'python -m'.", short="-m"),
        flag("no_python", "SCRIPT is a program, not Python."),
        flag("run_path", "Run SCRIPT inside the process that the agent makes (runpy)."),
        Option("role", "A name for these ranks.", "TEXT"),
        Option("numa_binding", "Bind each rank beside its GPU: node, socket ...", "MODE"),
        flag("virtual_local_rank", "Show each rank its GPU alone, as local rank 0."),
        Option("start_method", "How --run-path starts processes: spawn, fork ...", "METHOD"),
    ),
    "Meeting": (
        Option("master_addr", "Where node 0 is; without it, the run directory tells.", "HOST"),
        Option("master_port", "Where node 0 listens; by default 29500 with an address.", "N"),
        Option("local_addr", "The address of this node, where its name does not do.", "HOST"),
        flag("standalone", "One node, which meets nobody: the same as no option here."),
        Option("rdzv_backend", "Meet by torch's own c10d, static or etcd instead.", "NAME"),
        Option("rdzv_endpoint", "Where that is, as HOST:PORT.", "ADDRESS"),
        Option("rdzv_id", "A name of this launch, the same on all nodes, never used twice.", "ID"),
        Option("rdzv_conf", "More of torch's settings, as KEY=VALUE,KEY=VALUE.", "LIST"),
    ),
    "Failures and signals": (
        Option(
            "max_restarts", "How often all ranks start again after one failed; by default 0.", "N"
        ),
        Option("monitor_interval", "How often to check the ranks; by default 100ms.", "DURATION"),
        Option(
            "shutdown_timeout",
            "Time for ranks to exit before they are killed; by default 30s.",
            "DURATION",
        ),
        Option(
            "signals_to_handle",
            "Signals that end the launch and its ranks; by default SIGTERM,SIGINT,SIGHUP,SIGQUIT.",
            "LIST",
        ),
        Option("event_log_handler", "Where torch's events go: null or console.", "NAME"),
    ),
    "Output": (
        Option("log_dir", "Files of the ranks' output; by default logs/ of the run.", "DIR"),
        Option(
            "redirects",
            "To files alone: 1 stdout, 2 stderr, 3 both, or 0:3,1:1.",
            "WHAT",
            short="-r",
        ),
        Option("tee", "To files and here, as --redirects; by default 3.", "WHAT", short="-t"),
        Option("local_ranks_filter", "Show the output of these local ranks alone.", "LIST"),
        Option("duplicate_stdout_filters", "Copy lines of stdout with these words.", "LIST"),
        Option("duplicate_stderr_filters", "Copy lines of stderr with these words.", "LIST"),
        Option("logs_specs", "An installed torchrun.logs_specs that says where logs go.", "NAME"),
    ),
}
"""Every option of torchrun under its longest spelling, grouped by panel of the help."""


def all_options() -> dict[str, Option]:
    """Return every option by its name."""
    return by_name(PANELS)
