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


def first_job_id(epoch_s: float) -> int:
    """Return the id of a lab's first job, from its start time in tenths of a second.

    Two labs hardly ever share an id, so a log named after a job is not that of an earlier lab.
    """
    return int(epoch_s * 10) % _JOB_IDS + 1


def slurm_conf(
    settings: LabSettings, paths: LabPaths, *, port: int, user: str, first_job: int
) -> str:
    """Return slurm.conf(5) for daemons that run as ``user`` on the ports from ``port`` on."""
    nodes, gpus = settings.nodes, settings.gpus_per_node
    gres = f" Gres=gpu:{settings.gpu_type}:{gpus}" if gpus else ""
    # A requeued job waits until its old credential has expired (cred_expire): 120 s by default.
    # Daemons listen on the address of their host name (NoInAddrAny), 127.0.0.1 in a lab.
    # With ReturnToService=2, a reply from before a crash would return a node to service.
    text = f"""\
ClusterName={CLUSTER_NAME}
SlurmctldHost={CONTROL}({LOOPBACK})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={paths.munge_socket},cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={port}
StateSaveLocation={paths.state}
SlurmdSpoolDir={paths.spool}/%n
SlurmctldPidFile={paths.run}/slurmctld.pid
SlurmdPidFile={paths.run}/slurmd-%n.pid
SlurmctldLogFile={paths.log("slurmctld")}
SlurmdLogFile={paths.log("slurmd-%n")}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MaxArraySize=1001
KillWait=30
SlurmctldTimeout=30
SlurmdTimeout=30
InactiveLimit=0
MinJobAge=300
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PropagateResourceLimitsExcept=MEMLOCK
MailProg=/bin/true
FirstJobId={first_job}
"""
    if settings.accounting:
        text += f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={CONTROL}
AccountingStoragePort={port + nodes + 1}
AccountingStoragePass={paths.munge_socket}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
"""
    text += "GresTypes=gpu\n" if gpus else ""
    return f"""{text}\
NodeName={node_range(settings)} NodeAddr={LOOPBACK} Port={_range(port + 1, port + nodes)} \
CPUs={CPUS_PER_NODE} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 \
RealMemory={MEM_PER_NODE_MIB}{gres}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 MaxTime=3-00:00:00 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=3-00:00:00 State=UP
"""


def node_range(settings: LabSettings) -> str:
    """Return all nodes as one host list: ``n[1-8]``."""
    return f"n{_range(1, settings.nodes)}"


def _range(first: int, last: int) -> str:
    return f"[{first}-{last}]" if last > first else str(first)


def gres_conf(settings: LabSettings, paths: LabPaths) -> str:
    """Return gres.conf(5) with the devices that represent GPUs."""
    gpus = settings.gpus_per_node
    if not gpus:
        return "AutoDetect=off\n"
    files = f"{paths.devices}/gpu{_range(0, gpus - 1)}"
    node = f"NodeName={node_range(settings)} Name=gpu Type={settings.gpu_type} File={files}"
    return f"AutoDetect=off\n{node}\n"


def slurmdbd_conf(settings: LabSettings, paths: LabPaths, *, port: int, user: str) -> str:
    """Return slurmdbd.conf(5); slurmdbd finds the database by MYSQL_UNIX_PORT."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={paths.munge_socket}
DbdHost={CONTROL}
DbdAddr={LOOPBACK}
DbdPort={port + settings.nodes + 1}
CommunicationParameters=NoInAddrAny
SlurmUser={user}
PidFile={paths.run}/slurmdbd.pid
LogFile={paths.log("slurmdbd")}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm
"""


def cluster_toml(settings: LabSettings) -> str:
    """Return a cluster file: the built-in ``lab`` with the nodes and GPUs of this lab."""
    limits = f'max_walltime = "3-00:00:00"\nnodes = {settings.nodes}'
    partitions = [f'\n[[partitions]]\nname = "{name}"\n{limits}\n' for name in ("main", "urgent")]
    return f"""\
extends = "lab"
description = "a Slurm of 'hpctk lab': {settings.words}"
nodes = {settings.nodes}
gpus_per_node = {settings.gpus_per_node}
gpu_type = "{settings.gpu_type}"
{"".join(partitions)}"""


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
