"""The settings of a lab, the paths of its files, and the text of its configuration files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from hpc_toolkit.errors import ConfigError

CLUSTER_NAME = "hpctklab"
"""A name that no site would use, because the built-in cluster ``lab`` is recognized by it."""
CONTROL = "localhost"
"""The host name that slurmctld, slurmdbd and munged see."""
LOOPBACK = "127.0.0.1"
_JOB_IDS = 60_000_000  # Slurm counts to 67 million.
MAX_NODES = 256
MAX_GPUS = 64
CPUS_PER_NODE = 32
"""As in clusters/lab.toml; Slurm counts these CPUs, but the machine need not have them."""
MEM_PER_NODE_MIB = 192_000
MAX_SOCKET_BYTES = 107
"""Longest path of a Unix socket: unix(7), sun_path without its terminating null byte."""

_HALF = 8
"""Hexadecimal digits in a token for the root directory, and behind them for the lab's."""

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_GPU_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,30}")
# Characters that slurm.conf(5), mount(8) and a shell all accept without quotes.
_PATH = re.compile(r"[A-Za-z0-9/._+@-]+")


@dataclass(frozen=True, slots=True)
class LabSettings:
    """The size and the parts of a lab."""

    nodes: int = 8
    gpus_per_node: int = 4
    """Devices that Slurm allocates as GPUs, although they are none. 0 makes a lab without GPUs."""
    gpu_type: str = "l40s"
    accounting: bool = False
    """Whether the lab runs slurmdbd and its own MariaDB, so that sacct answers."""
    root: str = ""
    """Directory of the root whose Slurm the lab runs; empty for the Slurm of this machine."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an invalid value."""
        for option, value, low, high in (
            ("--nodes", self.nodes, 1, MAX_NODES),
            ("--gpus-per-node", self.gpus_per_node, 0, MAX_GPUS),
        ):
            if not low <= value <= high:
                message = f"{option}: {value} is outside {low}..{high}"
                raise ConfigError(message, hint="all nodes of a lab run on this machine")
        if not _GPU_TYPE.fullmatch(self.gpu_type):
            message = f"--gpu-type: {self.gpu_type!r} is not a valid GPU type"
            raise ConfigError(message, hint="use a letter, then letters, digits or _: l40s, a100")
        if self.root and not _PATH.fullmatch(self.root):
            message = f"--slurm: {self.root!r} is not a directory that mount can name"
            raise ConfigError(message, hint="use a path of letters, digits and /._+@-")

    @property
    def words(self) -> str:
        """The settings in words: ``8 nodes with 4 l40s each``."""
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        gpus = f" with {self.gpus_per_node} {self.gpu_type} each" if self.gpus_per_node else ""
        accounting = " and accounting" if self.accounting else ""
        return nodes + gpus + accounting + (f", root {self.root}" if self.root else "")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    @property
    def built_in(self) -> bool:
        """Whether the built-in cluster ``lab`` describes this lab, apart from nodes and GPUs that
        this lab may lack.
        """
        usual = LabSettings()
        fewer = self.nodes <= usual.nodes and self.gpus_per_node <= usual.gpus_per_node
        return fewer and (self.gpu_type == usual.gpu_type or self.gpus_per_node == 0)


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        message = f"--name: {name!r} is not a valid lab name"
        hint = "use a lower-case letter, then lower-case letters, digits or -"
        raise ConfigError(message, hint=hint)
    return name


def lab_token(directory: Path, root: Path = Path("/")) -> str:
    """Return the token of the lab in a directory, as :attr:`LabPaths.token` has it.

    ``root`` is the root directory to which the path refers: processes with different roots can be
    in one PID namespace, and each root can have a lab at this path.
    """
    told = root.stat()
    halves = (f"{told.st_dev}:{told.st_ino}", str(directory))
    return "hpctk-" + "".join(sha256(one.encode()).hexdigest()[:_HALF] for one in halves)


class _Below:
    """A path below the root of a lab."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, paths: LabPaths, _owner: type[LabPaths]) -> Path:
        return paths.root / self._path


@dataclass(frozen=True, slots=True)
class LabPaths:
    """The directories and the most important files of one lab."""

    root: Path

    record = _Below("lab.json")
    lock = _Below("lock")
    etc = _Below("etc")
    slurm_conf = _Below("etc/slurm.conf")
    cluster_file = _Below("etc/lab.toml")
    """The lab's facts, for ``hpctk render --cluster``."""
    enter_root = _Below("etc/enter-root")
    """Script that runs a command in the lab's root; missing without --slurm."""
    clients = _Below("bin")
    """Directory of scripts that run Slurm's commands in the lab; missing without --slurm."""
    hosts = _Below("hosts")
    devices = _Below("dev")
    logs = _Below("log")
    run = _Below("run")
    state = _Below("state")
    spool = _Below("spool")
    munge = _Below("munge")
    munge_socket = _Below("munge/socket")
    munge_private = _Below("munge/private")
    database = _Below("db")
    database_socket = _Below("db/socket")
    database_temporary = _Below("db/tmp")
    crashed = _Below("crashed")
    """Directory with one empty file per node that 'hpctk lab crash' killed."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a path that Slurm's configuration or a Unix socket cannot hold."""
        if not self.root.is_absolute() or not _PATH.fullmatch(str(self.root)):
            message = f"{self.root}: not a directory that Slurm's configuration can name"
            hint = "give --dir an absolute path of letters, digits and /._+@-"
            raise ConfigError(message, hint=hint)
        longest = max(len(str(path)) for path in (self.munge_socket, self.database_socket))
        if longest > MAX_SOCKET_BYTES:
            message = f"{self.root}: {longest - MAX_SOCKET_BYTES} bytes too long for its sockets"
            raise ConfigError(message, hint="give a shorter directory with --dir")

    @property
    def token(self) -> str:
        """The token that marks every process of this lab, also after its directory is removed."""
        token = lab_token(self.root)
        # A process in the lab's root sees another root directory. In a copy of a lab's directory
        # the second half differs, and must not name the processes of that lab.
        for file in self.hosts.glob(f"hpctk-{'?' * _HALF}{token[-_HALF:]}.*"):
            return file.name.partition(".")[0]
        return token

    @property
    def unfinished_record(self) -> str:
        return f".{self.record.name}.*.tmp"

    def written(self) -> tuple[Path, ...]:
        """The directories that a start creates."""
        return (
            self.etc, self.hosts, self.devices, self.run, self.state, self.spool, self.munge,
            self.database, self.crashed, self.logs, self.clients,
        )  # fmt: skip

    def hosts_file(self, start: str, node: str) -> Path:
        return self.hosts / f"{self.token}.{start}.{node}"

    def log(self, daemon: str) -> Path:
        return self.logs / f"{daemon}.log"


def labs_home() -> Path:
    """Return the directory of the labs that were started without --dir."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        home = state if state.is_absolute() else Path.home() / ".local/state"
    except RuntimeError:
        message = "this user has no home directory for labs"
        raise ConfigError(message, hint="give --dir, or set HOME or XDG_STATE_HOME") from None
    return home / "hpctk/labs"


def lab_paths(name: str, directory: Path | None) -> LabPaths:
    where = directory if directory is not None else labs_home() / check_name(name)
    try:
        # Resolved, so that a lab has one token whatever path names it.
        return LabPaths(where.expanduser().resolve())
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"{where}: {error}", hint="give another directory with --dir") from None


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
