"""The files of a lab are what Slurm is to read, and nothing a user gives can end up elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.lab import directory
from hpc_toolkit.lab.settings import (
    MAX_SOCKET_BYTES,
    LabPaths,
    LabSettings,
    cluster_toml,
    gres_conf,
    hosts_text,
    ports_needed,
    slurm_conf,
)
from hpc_toolkit.slurm.clusters.facts import load_cluster

SMALL = LabSettings(nodes=2, gpus_per_node=2, gpu_type="a100")
PATHS = LabPaths(Path("/tmp/lab"))

SLURM_CONF = """\
ClusterName=hpctklab
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=ada
SlurmdUser=ada
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=/tmp/lab/munge/socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort=17000
StateSaveLocation=/tmp/lab/state
SlurmdSpoolDir=/tmp/lab/spool/%n
SlurmctldPidFile=/tmp/lab/run/slurmctld.pid
SlurmdPidFile=/tmp/lab/run/slurmd-%n.pid
SlurmctldLogFile=/tmp/lab/log/slurmctld.log
SlurmdLogFile=/tmp/lab/log/slurmd-%n.log
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
FirstJobId=700
GresTypes=gpu
NodeName=n[1-2] NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=32 Boards=1 SocketsPerBoard=1 \
CoresPerSocket=32 ThreadsPerCore=1 RealMemory=192000 Gres=gpu:a100:2
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 MaxTime=3-00:00:00 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=3-00:00:00 State=UP
"""


def conf_of(settings: LabSettings) -> str:
    return slurm_conf(settings, PATHS, port=17000, user="ada", first_job=700)


def test_slurm_conf_is_this_text() -> None:
    assert conf_of(SMALL) == SLURM_CONF


def test_gres_conf_names_a_device_for_each_gpu() -> None:
    assert gres_conf(SMALL, PATHS) == (
        "AutoDetect=off\nNodeName=n[1-2] Name=gpu Type=a100 File=/tmp/lab/dev/gpu[0-1]\n"
    )


def test_accounting_adds_its_lines_and_its_port() -> None:
    settings = LabSettings(nodes=2, accounting=True)

    more = set(conf_of(settings).splitlines()) - set(conf_of(LabSettings(2)).splitlines())

    assert more == {
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=localhost",
        "AccountingStoragePort=17003",
        "AccountingStoragePass=/tmp/lab/munge/socket",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=5",
    }
    assert ports_needed(settings) == 4


def test_hosts_keeps_the_machines_names_but_not_for_nodes() -> None:
    machine = (
        "127.0.0.1\tlocalhost\n::1 localhost ip6-localhost # six\n10.0.0.7 n2 n2.site vm\n#x\n"
    )

    assert hosts_text(SMALL, machine).splitlines() == [
        "127.0.0.1 localhost",
        "127.0.0.1 n1",
        "127.0.0.1 n2",
        "::1 ip6-localhost",
        "10.0.0.7 n2.site vm",
    ]


@pytest.mark.parametrize(
    "settings",
    [LabSettings(3, 8, "a100"), LabSettings(40, 0, "x")],
    ids=lambda settings: settings.words,
)
def test_the_facts_of_a_lab_are_what_it_was_started_with(
    settings: LabSettings, tmp_path: Path
) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(cluster_toml(settings))
    path.chmod(0o644)

    site = load_cluster(str(path))

    given = (settings.nodes, settings.gpus_per_node, settings.gpu_type)
    assert (site.nodes, site.gpus_per_node, site.gpu_type) == given
    assert {one.name: one.nodes for one in site.partitions} == {
        "main": settings.nodes,
        "urgent": settings.nodes,
    }
    usual = load_cluster("lab")
    assert [one.max_walltime_s for one in site.partitions] == [
        one.max_walltime_s for one in usual.partitions
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": 0}, "--nodes: 0 is outside 1..256"),
        ({"gpus_per_node": -1}, "--gpus-per-node: -1 is outside 0..64"),
        ({"gpu_type": "l40s:4\nSlurmUser=x"}, "--gpu-type: .* is not a valid GPU type"),
        ({"gpu_type": ""}, "--gpu-type: '' is not"),
        ({"root": "/a,b"}, "'/a,b' is not a directory that mount can name"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LabSettings(**settings)  # type: ignore[arg-type] # what a test gives is not checked


@pytest.mark.parametrize("directory", ["/tmp/a b", "/tmp/%n", "lab", "/tmp/é", "/a\nb"])
def test_a_directory_that_slurm_conf_cannot_hold_is_refused(directory: str) -> None:
    with pytest.raises(ConfigError, match="not a directory that Slurm's configuration can name"):
        LabPaths(Path(directory))


def test_a_directory_too_long_for_a_socket_is_refused_from_the_first_byte_on() -> None:
    room = MAX_SOCKET_BYTES - len("/munge/socket")
    longest = Path("/" + "d" * (room - 1))

    assert len(str(LabPaths(longest).munge_socket)) == MAX_SOCKET_BYTES
    with pytest.raises(ConfigError, match="1 bytes too long for its sockets"):
        LabPaths(Path(f"{longest}d"))


def test_a_lab_whose_record_a_full_disk_cut_is_a_lab_and_other_directories_are_not(
    tmp_path: Path,
) -> None:
    paths = LabPaths(tmp_path)
    (tmp_path / "etc").mkdir()
    for text, is_one in (("", True), ('{"form', True), ('{"other": 1', False)):
        paths.record.write_text(text, encoding="utf-8")
        assert directory.is_lab(paths) is is_one, text

    (tmp_path / "thesis.tex").touch()
    paths.record.write_text('{"form', encoding="utf-8")
    assert not directory.is_lab(paths)
