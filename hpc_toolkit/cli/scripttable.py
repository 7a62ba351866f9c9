"""The options of a job script, told once for every command that renders one.

The name of an option is that of a field of ScriptSpec, or a singular of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.cli.arguments import complete_cluster
from hpc_toolkit.system.options import Option, flag, many

if TYPE_CHECKING:
    from hpc_toolkit.system.options import Panels

PANELS: Panels = {
    "Resources": (
        Option("nodes", "Number of nodes; by default 1.", "N"),
        Option("gpus_per_node", "GPUs on each node, as 4 or l40s:4; by default none.", "[TYPE:]N"),
        Option("ntasks_per_node", "Ranks on each node; by default one per GPU.", "N"),
        Option("cpus_per_task", "CPUs of a rank; by default its share.", "N"),
        Option("mem", "Memory of each node ('480G'); 0 is all of it.", "SIZE"),
        Option("mem_per_cpu", "Memory per CPU.", "SIZE"),
        Option("mem_per_gpu", "Memory per GPU.", "SIZE"),
        Option("ntasks", "Ranks in all, where nodes may have different numbers.", "N"),
        Option("ntasks_per_gpu", "Ranks that share one GPU, and see no other.", "N"),
        Option("cpus_per_gpu", "CPUs per GPU.", "N"),
        Option("gpu_type", "Type of the GPUs; by default the cluster's.", "TYPE"),
        flag("isolate_gpus", "Let each rank see its own GPUs alone."),
        Option("gpu_bind", "Which GPUs a rank sees: closest, single:2, map_gpu:0,1 ..."),
        Option("gres", "Other resources of each node, such as nvme:1.", "LIST"),
        Option("gres_flags", "enforce-binding, disable-binding ..."),
        Option("tmp", "Local disk of each node.", "SIZE"),
        Option("licenses", "Licenses, such as ansys:2.", "LIST"),
    ),
    "Time": (
        Option("time", "Time limit, as sbatch reads it ('90' is minutes).", "TIME"),
        Option("time_min", "Shortest limit that is of use, to start earlier.", "TIME"),
        Option("begin", "Not before: 18:00, tomorrow, now+2hours, 2030-01-31T18:00.", "WHEN"),
        Option("deadline", "Ended by then, or not started.", "WHEN"),
        Option("signal", "When the ranks start to finish.", "B:USR1@SECONDS"),
        flag("requeue/no-requeue", "Start again while items are left."),
        Option("max_restarts", "How often, Slurm's own restarts included; by default 10.", "N"),
        Option("idle_exit", "How long a rank waits for work; by default 10min.", "DURATION"),
        Option("lease", "Silence after which a rank counts as dead; by default 3min.", "DURATION"),
    ),
    "Placement": (
        Option(
            "cluster",
            "Limits and notation: a name of 'hpctk cluster list', or a TOML file.",
            complete=complete_cluster,
        ),
        Option("account", "Who pays."),
        Option("partition", "Comma-separated partitions."),
        Option("qos", "Quality of service."),
        Option("reservation", "Comma-separated reservations."),
        Option("constraint", "Node features."),
        Option("prefer", "Node features that would be better (Slurm 22.05)."),
        Option("nodelist", "Nodes that must be used."),
        Option("exclude", "Nodes that must not be used."),
        Option(
            "exclusive",
            "Share the nodes with no other job; =user, =mcs or =topo (24.05) with some.",
            "[=WHOM]",
            without="yes",
        ),
        flag("oversubscribe", "Allow others on the same CPUs."),
        flag("spread_job", "Take as many nodes as possible."),
        Option("switches", "At most so many leaf switches.", "N[@TIME]"),
        Option("segment", "Nodes of one block each (Slurm 24.05).", "N"),
        Option("network", "What the switch plugin is told."),
    ),
    "Order": (
        Option("array", "Indices of a job array, %8 for at most 8 at once.", "0-99%8"),
        Option("array_offset", "What the script adds to its index.", "N"),
        Option("dependency", "afterok:JOB, afterany:JOB, after:JOB+MINUTES, singleton ..."),
        Option("kill_on_invalid_dep", "Cancel a job if that can never be met: yes.", "yes|no"),
        flag("hold", "Wait for 'scontrol release'."),
        Option("priority", "A number or TOP; for operators of Slurm."),
        Option(
            "nice",
            "How much lower the priority shall be; 100 without a value.",
            "[=N]",
            without="100",
        ),
    ),
    "Job and its log": (
        Option("job_name", "Name of job and script; by default TEMPLATE."),
        Option("output", "The log; by default slurm/logs/%x-%j.out.", "PATTERN"),
        Option("error", "A log of its own for stderr.", "PATTERN"),
        Option("open_mode", "append (the default) or truncate."),
        Option("chdir", "Work there; by default where sbatch is called.", "DIR"),
        Option("comment", "A remark that Slurm keeps."),
        Option("wckey", "Workload characterization key."),
        Option("mail_type", "Events that send mail: END,FAIL ..."),
        Option("mail_user", "Who gets it."),
        many("sbatch", "Pass on any other option of sbatch", "NAME[=VALUE]"),
    ),
    "Training": (
        Option("run_dir", "Where ranks meet, and logs are; by default runs/JOB-NAME.", "DIR"),
        Option("launch", "task-per-node (the default), or task-per-gpu.", "FORM"),
        Option("nproc_per_node", "Ranks on each node; by default one per GPU.", "N"),
        Option("rank_restarts", "How often ranks start again inside a job; by default 3.", "N"),
        Option("backend", "nccl or gloo; by default nccl where there are GPUs.", "NAME"),
        many("stage", "Copy this to each node's disk first", "PATH"),
        Option("stage_dir", "To this directory; by default $SLURM_TMPDIR or $TMPDIR.", "DIR"),
        Option("cpu_bind", "none, cores, sockets, ldoms ...; srun's words.", "WHAT"),
        Option("mem_bind", "none, local ...; srun's words.", "WHAT"),
        Option(
            "numa_binding", "Ranks of a launcher, beside their GPUs: node, exclusive ...", "MODE"
        ),
        Option("distribution", "block, cyclic, block:cyclic ...; srun's words.", "HOW"),
        Option("hint", "nomultithread, compute_bound, memory_bound ...", "WORD"),
    ),
    "Environment": (
        flag("plain", "Write a script of srun and torchrun alone, for nodes without hpctk."),
        Option("run", "The run; the script's argument overrides it.", "DIR"),
        Option("python", "Interpreter on the nodes; by default this one.", "FILE"),
        Option("container_python", "Interpreter in the container.", "FILE"),
        many("module", "Load this module"),
        Option("conda", "Activate this conda environment: a name or an absolute path."),
        Option("venv", "Use this virtual environment.", "DIR"),
        Option("container", "Run the ranks in this image."),
        many("bind", "Show this directory to the container", "FROM[:TO[:ro]]"),
        many("env", "Export this variable", "NAME=VALUE"),
        many("setup", "Run this command first", "COMMAND"),
        many("node_setup", "Run this command first, once on every node", "COMMAND"),
        many("teardown", "Run this command at the end", "COMMAND"),
        flag("get_user_env", "Let Slurm make the environment of a login."),
        Option(
            "propagate",
            "Take resource limits along; all without a value.",
            "[=LIST]",
            without="ALL",
        ),
    ),
}
"""Every option, by the panel of the help that shows it."""
