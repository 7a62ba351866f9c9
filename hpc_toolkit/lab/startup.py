"""Start a lab until all its nodes are idle, after cleaning up a previous one."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab import config
from hpc_toolkit.lab.clients import node_states
from hpc_toolkit.lab.daemons import (
    Host,
    check_namespaces,
    failure,
    start_munged,
    start_slurmctld,
    start_slurmd,
    user_name,
    wait_for_all,
    wait_for_daemon,
)
from hpc_toolkit.lab.directory import LabRecord, remove_files, write_record
from hpc_toolkit.lab.members import kill_members
from hpc_toolkit.lab.ports import free_block, listeners
from hpc_toolkit.lab.status import status_of

if TYPE_CHECKING:
    from hpc_toolkit.lab.settings import LabPaths, LabSettings

_IDLE_S = 60.0
_PAUSE_S = 0.05
_KEY_BYTES = 1024


def start_lab(paths: LabPaths, settings: LabSettings) -> None:
    """Remove leftovers of an earlier start, then start every daemon and wait for the nodes.

    The caller holds the lab's lock, and kills the started processes if this raises.

    Raises:
        HpcToolkitError: a daemon does not start; the error has the end of its log.
    """
    end_lab(paths)
    remove_files(paths)
    port = free_block(config.ports_needed(settings), seed=int(paths.token[-8:], 16))
    record = LabRecord(settings, port, os.urandom(4).hex(), ready=False)
    write_record(paths, record)
    _write_files(paths, record)
    control = Host(paths, record.start)
    check_namespaces(control)
    _start_daemons(record, control)
    wait_for_nodes(paths, settings.node_names, {"idle"})
    write_record(paths, LabRecord(settings, port, record.start, ready=True))


def end_lab(paths: LabPaths) -> int:
    """Kill all processes of a lab, including those just being started; return their number.

    The caller holds the lab's lock.

    Raises:
        HpcToolkitError: a process does not end.
    """
    # Without its hosts file, a process that is just being started fails; if it has mounted the
    # file already, it is found.
    shutil.rmtree(paths.hosts, ignore_errors=True)
    return kill_members(paths.token)


def _write_files(paths: LabPaths, record: LabRecord) -> None:
    settings, port, user = record.settings, record.port, user_name()
    for path, mode in (
        (paths.etc, 0o755), (paths.hosts, 0o755), (paths.devices, 0o755), (paths.run, 0o755),
        (paths.logs, 0o755), (paths.spool, 0o755), (paths.state, 0o700),
        (paths.munge, 0o711), (paths.munge_private, 0o700), (paths.database, 0o700),
    ):  # fmt: skip
        path.mkdir(mode=mode)
        path.chmod(mode)
    _write(paths.munge_private / "key", os.urandom(_KEY_BYTES), 0o600)
    for number in range(settings.gpus_per_node):
        _write(paths.devices / f"gpu{number}", b"", 0o644)
    hosts = config.hosts_text(settings, Path("/etc/hosts").read_text(errors="replace"))
    for node in (config.CONTROL, *settings.node_names):
        _write(paths.hosts_file(record.start, node), hosts.encode(), 0o644)
    first_job = config.first_job_id(time.time())
    slurm = config.slurm_conf(settings, paths, port=port, user=user, first_job=first_job)
    _write(paths.slurm_conf, slurm.encode(), 0o644)
    _write(paths.etc / "gres.conf", config.gres_conf(settings, paths).encode(), 0o644)
    _write(paths.cluster_file, config.cluster_toml(settings).encode(), 0o644)
    if settings.accounting:
        text = config.slurmdbd_conf(settings, paths, port=port, user=user)
        _write(paths.etc / "slurmdbd.conf", text.encode(), 0o600)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Create a file with its mode from the first byte on, whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.fchmod(fd, mode)
        os.write(fd, data)
    finally:
        os.close(fd)


def _start_daemons(record: LabRecord, control: Host) -> None:
    start_munged(control).wait()
    if record.settings.accounting:
        from hpc_toolkit.lab.accounting import start_database, start_slurmdbd

        start_database(control)
        start_slurmdbd(control)
        _check_listeners(record)
    start_slurmctld(control).wait()
    # Wait for slurmctld: a slurmd that cannot reach it retries only after a second.
    wait_for_daemon(control, "slurmctld", lambda: _listens(record.port))
    hosts = [Host(control.paths, record.start, node) for node in record.settings.node_names]
    wait_for_all([start_slurmd(host) for host in hosts])
    _check_listeners(record)


def _listens(port: int) -> bool:
    return any(one.port == port for one in listeners())


def _check_listeners(record: LabRecord) -> None:
    """Raise HpcToolkitError if other machines can reach a port of the lab."""
    block = range(record.port, record.port + config.ports_needed(record.settings))
    exposed = [one.port for one in listeners() if one.port in block and not one.loopback]
    if exposed:
        message = f"ports {exposed} of the lab could be reached from other machines"
        raise HpcToolkitError(message, hint="'hosts:' in /etc/nsswitch.conf must begin with files")


def wait_for_nodes(paths: LabPaths, nodes: tuple[str, ...], states: set[str]) -> None:
    """Wait until each node is in one of ``states``.

    Raises:
        HpcToolkitError: a daemon ended, or a minute passed; the error has the end of a log.
    """
    deadline = time.monotonic() + _IDLE_S
    while True:
        now = node_states(paths)
        late = [node for node in nodes if now.get(node) not in states]
        if not late:
            return
        if gone := status_of(paths).gone:
            name, _, node = gone[0].partition(" of ")
            what = f"{gone[0]} ended"
            raise failure(what, paths.log(f"slurmd-{node}" if name == "slurmd" else name))
        if time.monotonic() > deadline:
            what = f"{late[0]} is {now.get(late[0], 'unknown')} after {_IDLE_S:.0f} s"
            raise failure(what, paths.log(f"slurmd-{late[0]}"), paths.log("slurmctld"))
        time.sleep(_PAUSE_S)
