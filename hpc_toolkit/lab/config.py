"""The configuration files of a lab, as text. Pure: nothing is read or written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.lab.ports import LOOPBACK
from hpc_toolkit.lab.settings import CPUS_PER_NODE, MEM_PER_NODE_MIB

if TYPE_CHECKING:
    from hpc_toolkit.lab.settings import LabPaths, LabSettings

CLUSTER_NAME = "hpctklab"
"""A name that no site would use, because the built-in cluster ``lab`` is recognized by it."""
CONTROL = "localhost"
"""The host name that slurmctld, slurmdbd and munged see."""
_JOB_IDS = 60_000_000  # Slurm counts to 67 million.


def ports_needed(settings: LabSettings) -> int:
    """Return how many consecutive ports a lab needs: slurmctld, one per node, slurmdbd."""
    return settings.nodes + 2


def database_port(settings: LabSettings, port: int) -> int:
    """Return the port of slurmdbd in the block of ports that begins at ``port``."""
    return port + settings.nodes + 1


def first_job_id(epoch_s: float) -> int:
    """Return the id of a lab's first job, from its start time in tenths of a second.

    Two labs hardly ever share an id, so a log named after a job is not that of an earlier lab.
    """
    return int(epoch_s * 10) % _JOB_IDS + 1


def slurm_conf(
    settings: LabSettings, paths: LabPaths, *, port: int, user: str, first_job: int
) -> str:
    """Return slurm.conf(5) for daemons that run as ``user`` on the ports from ``port`` on."""
    lines = [
        *_identity(paths, port=port, user=user),
        *_behaviour(),
        f"FirstJobId={first_job}",
        *_accounting(settings, paths, port=port),
        *_nodes(settings, port),
    ]
    return "\n".join(lines) + "\n"


def _identity(paths: LabPaths, *, port: int, user: str) -> list[str]:
    return [
        f"ClusterName={CLUSTER_NAME}",
        f"SlurmctldHost={CONTROL}({LOOPBACK})",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        # A requeued job waits until its old credential has expired: 120 s by default.
        f"AuthInfo=socket={paths.munge_socket},cred_expire=5",
        # Daemons listen on the address of their host name, which is 127.0.0.1 in a lab.
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        f"SlurmctldPort={port}",
        f"StateSaveLocation={paths.state}",
        f"SlurmdSpoolDir={paths.spool}/%n",
        f"SlurmctldPidFile={paths.run}/slurmctld.pid",
        f"SlurmdPidFile={paths.run}/slurmd-%n.pid",
        f"SlurmctldLogFile={paths.log('slurmctld')}",
        f"SlurmdLogFile={paths.log('slurmd-%n')}",
    ]


def _behaviour() -> list[str]:
    return [
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "SlurmdParameters=config_overrides",
        # With 2, a reply from before a crash would return a node to service (node_did_resp).
        "ReturnToService=1",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
        "MaxArraySize=1001",
        "KillWait=30",
        "SlurmctldTimeout=30",
        "SlurmdTimeout=30",
        "InactiveLimit=0",
        "MinJobAge=300",
        "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
        "PropagateResourceLimitsExcept=MEMLOCK",
        "MailProg=/bin/true",
    ]


def _accounting(settings: LabSettings, paths: LabPaths, *, port: int) -> list[str]:
    if not settings.accounting:
        return []
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={CONTROL}",
        f"AccountingStoragePort={database_port(settings, port)}",
        f"AccountingStoragePass={paths.munge_socket}",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=5",
    ]


def _nodes(settings: LabSettings, port: int) -> list[str]:
    first, last = port + 1, port + settings.nodes
    shape = f"CPUs={CPUS_PER_NODE} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS_PER_NODE}"
    node = (
        f"NodeName={node_range(settings)} NodeAddr={LOOPBACK} Port={_range(first, last)}"
        f" {shape} ThreadsPerCore=1 RealMemory={MEM_PER_NODE_MIB}"
    )
    gpus = settings.gpus_per_node
    limits = "MaxTime=3-00:00:00 State=UP"
    return [
        *(["GresTypes=gpu"] if gpus else []),
        node + (f" Gres=gpu:{settings.gpu_type}:{gpus}" if gpus else ""),
        f"PartitionName=main Nodes=ALL Default=YES PriorityTier=1 {limits}",
        f"PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF {limits}",
    ]


def node_range(settings: LabSettings) -> str:
    """Return all nodes as one host list: ``n[1-8]``."""
    return f"n{_range(1, settings.nodes)}"


def _range(first: int, last: int) -> str:
    return f"[{first}-{last}]" if last > first else str(first)


def gres_conf(settings: LabSettings, paths: LabPaths) -> str:
    """Return gres.conf(5) with the devices that represent GPUs."""
    lines = ["AutoDetect=off"]
    if settings.gpus_per_node:
        files = f"{paths.devices}/gpu{_range(0, settings.gpus_per_node - 1)}"
        lines.append(
            f"NodeName={node_range(settings)} Name=gpu Type={settings.gpu_type} File={files}"
        )
    return "\n".join(lines) + "\n"


def slurmdbd_conf(settings: LabSettings, paths: LabPaths, *, port: int, user: str) -> str:
    """Return slurmdbd.conf(5); slurmdbd finds the database by MYSQL_UNIX_PORT."""
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={paths.munge_socket}",
        f"DbdHost={CONTROL}",
        f"DbdAddr={LOOPBACK}",
        f"DbdPort={database_port(settings, port)}",
        "CommunicationParameters=NoInAddrAny",
        f"SlurmUser={user}",
        f"PidFile={paths.run}/slurmdbd.pid",
        f"LogFile={paths.log('slurmdbd')}",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        f"StorageUser={user}",
        "StorageLoc=slurm",
    ]
    return "\n".join(lines) + "\n"


def cluster_toml(settings: LabSettings) -> str:
    """Return a cluster file: the built-in ``lab`` with the nodes and GPUs of this lab."""
    lines = [
        'extends = "lab"',
        f"description = \"a Slurm of 'hpctk lab': {settings.words}\"",
        f"nodes = {settings.nodes}",
        f"gpus_per_node = {settings.gpus_per_node}",
        f'gpu_type = "{settings.gpu_type}"',
    ]
    for name in ("main", "urgent"):
        lines += ["", "[[partitions]]", f'name = "{name}"', 'max_walltime = "3-00:00:00"']
        lines.append(f"nodes = {settings.nodes}")
    return "\n".join(lines) + "\n"


def hosts_text(settings: LabSettings, machine: str) -> str:
    """Return the machine's hosts file with 127.0.0.1 for every name of the lab."""
    names = {CONTROL, *settings.node_names}
    lines = [f"{LOOPBACK} {name}" for name in (CONTROL, *settings.node_names)]
    for line in machine.splitlines():
        address, *words = line.partition("#")[0].split() or [""]
        others = [word for word in words if word not in names]
        if others:
            lines.append(" ".join([address, *others]))
    return "\n".join(lines) + "\n"
