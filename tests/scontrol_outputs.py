"""Output of scontrol on three sites, in its versions' formats; names and numbers are invented.

Each line of ``--oneliner show partition`` and ``show node`` is one record.
"""

from __future__ import annotations

from hpc_toolkit.slurm.clusters.draft import SlurmFacts
from hpc_toolkit.slurm.controller import parse_config
from hpc_toolkit.slurm.records import parse_records

_CONFIG = """Configuration data as of 2026-11-21T08:55:08
AccountingStorageEnforce = {enforce}
AccountingStorageType   = accounting_storage/slurmdbd
AuthInfo                = (null)
ClusterName             = {name}
JobSubmitPlugins        = {plugins}
MaxArraySize            = {array}
MaxMemPerNode           = {mem}
SchedulerParameters     = {scheduler}
SelectType              = {select}
SelectTypeParameters    = {parameters}
SLURM_CONF              = /etc/slurm/slurm.conf
SLURM_VERSION           = {version}
SlurmctldHost[0]        = ctl1(10.0.0.1)
UnkillableStepTimeout   = 60 sec

Cgroup Support Configuration:
AllowedRAMSpace         = 100.0%

Slurmctld(primary) at ctl1 is UP
"""


_PARTITION = """AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A
DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED
MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=x[1-2] PriorityJobFactor=1
PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP
TotalCPUs=64 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED
MaxMemPerNode=UNLIMITED TRES=cpu=64,mem=380000M,node=2,billing=64"""


def _partition(name: str, **given: object) -> str:
    values = dict(pair.split("=", 1) for pair in _PARTITION.split())
    pairs = {"PartitionName": name, **values, **given}
    return " ".join(f"{key}={value}" for key, value in pairs.items())


def _old_node(name: str, gres: str, partitions: str, *, kept: str = "") -> str:
    """Return a node as Slurm 20.11 prints it: without CPUEfctv."""
    return (
        f"NodeName={name} Arch=x86_64 CoresPerSocket=16  CPUAlloc=0 CPUTot=32 CPULoad=0.01"
        f" AvailableFeatures=skylake ActiveFeatures=skylake Gres={gres} NodeAddr={name}"
        f" NodeHostName={name} Version=20.11.9 OS=Linux 4.18.0-372.el8.x86_64 #1 SMP Tue Aug 2"
        f" 16:19:42 UTC 2022  RealMemory=190000 AllocMem=0 FreeMem=185000 Sockets=2 Boards=1"
        f" {kept} State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A"
        f" Partitions={partitions}  BootTime=2023-02-13T21:25:58"
        " SlurmdStartTime=2023-02-14T00:25:43 CfgTRES=cpu=32,mem=190000M,billing=32 AllocTRES="
        " CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s"
        " Comment=(null)"
    )


def _new_node(name: str, cpus: int, mem: int, gres: str, partitions: str, end: str = "") -> str:
    """Return a node as Slurm 25.05 prints it."""
    return (
        f"NodeName={name} Arch=x86_64 CoresPerSocket=32  CPUAlloc=0 CPUEfctv={cpus - 2}"
        f" CPUTot={cpus} CPULoad=0.01 AvailableFeatures=(null) ActiveFeatures=(null) Gres={gres}"
        f" NodeAddr={name} NodeHostName={name} Version=25.05.3 OS=Linux 5.14.0-503.el9.x86_64 #1"
        f" SMP PREEMPT_DYNAMIC Thu Nov 2 18:01:13 UTC 2  RealMemory={mem} AllocMem=0 FreeMem=97029"
        " Sockets=2 Boards=1 CoreSpecCount=2 CPUSpecList=0,32 State=MIXED+PLANNED ThreadsPerCore=1"
        f" TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions={partitions} "
        " BootTime=2026-10-07T21:50:56 SlurmdStartTime=2026-10-07T21:54:09"
        " LastBusyTime=2026-11-08T22:51:31 ResumeAfterTime=None"
        f" CfgTRES=cpu={cpus - 2},mem={mem}M,billing=16,gres/gpu=4 AllocTRES= {end}"
    )


def facts(config: str, partitions: list[str], nodes: list[str]) -> SlurmFacts:
    """Parse the three outputs of a site."""
    return SlurmFacts(
        config=parse_config(config),
        partitions=parse_records("\n".join(partitions) + "\n"),
        nodes=parse_records("\n".join(nodes) + "\n"),
    )


OLD_LINEAR = facts(
    _CONFIG.format(
        name="oldtimer",
        version="20.11.9",
        enforce="none",
        plugins="(null)",
        array=10001,
        mem="UNLIMITED",
        scheduler="disable_job_shrink,bf_interval=30",
        select="select/linear",
        parameters="CR_ONE_TASK_PER_CORE",
    ),
    [_partition("debug", Default="YES", MaxTime="00:30:00", MaxNodes=1)],
    [
        _old_node("x1", "gpu:tesla:2(S:0-1),nvme:1", "debug", kept="MemSpecLimit=2048"),
        _old_node("x2", "gpu:tesla:2(S:0-1),nvme:1", "debug", kept="MemSpecLimit=2048"),
    ],
)
"""Slurm 20.11 with select/linear, and one partition with a time limit of half an hour."""

ROUTED = facts(
    _CONFIG.format(
        name="Routed",
        version="25.05.3",
        enforce="associations,limits,qos",
        plugins="lua",
        array=1001,
        mem="UNLIMITED",
        scheduler="(null)",
        select="select/cons_tres",
        parameters="CR_CORE_MEMORY",
    ),
    [
        _partition("cpubase_b1", Default="YES", ExclusiveTopo="NO", MaxTime="03:00:00"),
        _partition("gpubase_l40s_b1", ExclusiveTopo="NO", MaxTime="03:00:00"),
        _partition("gpubase_h100_b1", ExclusiveTopo="NO", MaxTime="UNLIMITED"),
        _partition("private", AllowAccounts="lab-a,lab-b", DenyQos="low", MaxTime="7-00:00:00"),
        _partition("admin", RootOnly="YES"),
        _partition("broken", State="DOWN"),
        _partition("empty", Nodes="(null)"),
    ],
    [
        *(_new_node(f"c{i}", 64, 250000, "(null)", "cpubase_b1,admin,broken") for i in range(3)),
        *(_new_node(f"l{i}", 64, 515000, "gpu:l40s:4", "gpubase_l40s_b1") for i in range(4)),
        _new_node("h0", 48, 2060000, "gpu:h100:8(S:0-1)", "gpubase_h100_b1,private"),
        _new_node(
            "h1",
            48,
            2060000,
            "gpu:h100:8(S:0-1)",
            "gpubase_h100_b1",
            end="Reason=Gres=gpu:99 RealMemory=1 broken fan [root@2026-11-20T10:00:00]",
        ),
    ],
)
"""Slurm 25.05 with a submission plugin that routes jobs, and several kinds of nodes."""

MIXED = facts(
    _CONFIG.format(
        name="mixed",
        version="23.11.10",
        enforce="none",
        plugins="(null)",
        array=0,
        mem=240000,
        scheduler="(null)",
        select="select/cons_tres",
        parameters="CR_CPU_MEMORY",
    ),
    [
        _partition("preempt", PreemptMode="REQUEUE", MaxTime="UNLIMITED"),
        _partition("batch", Default="YES", MaxCPUsPerNode=48, MaxMemPerNode=200000),
    ],
    [
        _new_node("a1", 64, 256000, "gpu:4", "batch,preempt"),
        _new_node("a2", 64, 256000, "gpu:4", "batch,preempt"),
        _new_node("b1", 128, 512000, "gpu:a100:4,gpu:a100_1g.10gb:8", "preempt"),
        *(_new_node(f"z{i}", 128, 512000, "(null)", "batch") for i in range(3)),
    ],
)
"""Slurm 23.11 with untyped and partitioned GPUs, and nodes without any in the same partition."""
