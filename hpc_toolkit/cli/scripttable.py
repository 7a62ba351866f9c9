"""The options of a job script, for every command that renders one.

The name of an option is that of a field of ScriptSpec, or its singular. ``--sbatch NAME[=VALUE]``
sets the fields that repeat other options of sbatch (``slurm.render.passthrough.FIELDS``). The help
shows the options that people use daily; the others are hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.cli.arguments import complete_cluster
from hpc_toolkit.system.options import Option, flag, many

if TYPE_CHECKING:
    from hpc_toolkit.system.options import Panels


def _rare(name: str, help_text: str, metavar: str, *, repeated: bool = False) -> Option:
    """An option that few people need; the help does not show it."""
    return Option(name, help_text, metavar, repeated=repeated, hidden=True)


PANELS: Panels = {
    "Resources": (
        Option("nodes", "Number of nodes. [default: 1]", "N"),
        Option("gpus_per_node", "GPUs on each node: 4 or l40s:4. [default: 0]", "[TYPE:]N"),
        Option("ntasks_per_node", "Ranks on each node. [default: one per GPU]", "N"),
        Option("cpus_per_task", "CPUs of each rank. [default: its share]", "N"),
        Option("mem", "Memory of each node: 480G; 0 is all of it.", "SIZE"),
        Option("time", "Time limit, e.g. 4:00:00 or 4h; a plain number is minutes.", "TIME"),
        _rare("gpu_type", "Type of the GPUs. [default: the cluster's]", "TYPE"),
        _rare("isolate_gpus", "Let each rank see only its own GPUs.", ""),
    ),
    "Placement": (
        Option(
            "cluster",
            "A name from 'hpctk cluster list', or a TOML file.",
            complete=complete_cluster,
        ),
        Option("account", "Account to charge."),
        Option("partition", "Comma-separated partitions."),
        Option("qos", "Quality of service."),
    ),
    "Scheduling": (
        Option("array", "Indices of a job array; %8: at most 8 at once.", "0-99%8"),
        Option("dependency", "Jobs to wait for: afterok:JOB, afterany:JOB ..."),
        flag("requeue/no-requeue", "Requeue the job while items remain."),
        _rare("max_restarts", "Restarts, Slurm's own included. [default: 10]", "N"),
        _rare("array_offset", "Number that the script adds to its index. [default: 0]", "N"),
    ),
    "Job and its log": (
        Option("job_name", "Name of the job and script. [default: TEMPLATE]"),
        Option("output", "The log. [default: slurm/logs/%x-%j.out]", "PATTERN"),
        many("sbatch", "Any other option of sbatch", "NAME[=VALUE]"),
    ),
    "Training": (
        _rare("run_dir", "Directory for rendezvous and logs. [default: runs/JOB-NAME]", "DIR"),
        _rare("launch", "task-per-node (default) or task-per-gpu.", "FORM"),
        _rare("nproc_per_node", "Ranks on each node. [default: one per GPU]", "N"),
        _rare("rank_restarts", "Restarts of ranks inside a job. [default: 3]", "N"),
        _rare("backend", "nccl or gloo. [default: nccl with GPUs]", "NAME"),
        _rare("stage", "Copy this to each node's disk first.", "PATH", repeated=True),
        _rare("stage_dir", "Directory for copies. [default: $SLURM_TMPDIR or $TMPDIR]", "DIR"),
        _rare("cpu_bind", "CPUs of each task: 'srun --cpu-bind'.", "WHAT"),
        _rare("mem_bind", "NUMA nodes of each task: 'srun --mem-bind'.", "WHAT"),
        _rare("numa_binding", "Bind ranks near their GPUs: node, exclusive ...", "MODE"),
        _rare("distribution", "Order of the tasks: 'srun --distribution'.", "HOW"),
        _rare("hint", "nomultithread, memory_bound ...: 'srun --hint'.", "WORD"),
    ),
    "Environment": (
        Option("run", "Run directory; an argument of the script overrides it.", "DIR"),
        many("module", "Load this module"),
        Option("conda", "Activate this conda environment: name or path."),
        Option("venv", "Use this virtual environment.", "DIR"),
        Option("container", "Run the ranks in this image."),
        many("env", "Export this variable", "NAME=VALUE"),
        many("setup", "Run this command before the work starts", "COMMAND"),
        flag("plain", "Use only srun and torchrun, without hpctk."),
        _rare("idle_exit", "How long a rank waits for work. [default: 10min]", "DURATION"),
        _rare("lease", "Silence after which a rank counts as dead. [default: 3min]", "DURATION"),
        _rare("python", "Interpreter on the nodes. [default: this one]", "FILE"),
        _rare("container_python", "Interpreter in the container.", "FILE"),
        _rare("bind", "Bind a directory.", "FROM[:TO[:ro]]", repeated=True),
        _rare("node_setup", "Run this first, once on each node.", "COMMAND", repeated=True),
        _rare("teardown", "Run this command at the end.", "COMMAND", repeated=True),
    ),
}
"""Every option, by the panel of the help that shows it."""
