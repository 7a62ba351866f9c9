"""A private, real Slurm on this machine: start and stop it, show its status, crash its nodes."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hpc_toolkit.errors import ConfigError, HpcToolkitError, near_miss
from hpc_toolkit.lab import daemons, state
from hpc_toolkit.lab.commands import (
    CLIENTS,
    ask,
    check_programs,
    entering,
    interpreter_paths,
    machine_paths,
    node_states,
)
from hpc_toolkit.lab.settings import (
    CONTROL,
    LabPaths,
    LabSettings,
    cluster_toml,
    first_job_id,
    gres_conf,
    hosts_text,
    ports_needed,
    slurm_conf,
    slurmdbd_conf,
)

_LOCK_S = 180.0
_IDLE_S = 60.0
_PAUSE_S = 0.05
_KEY_BYTES = 1024


class Lab:
    """A private Slurm on this machine, in a directory of its own."""

    def __init__(self, paths: LabPaths) -> None:
        self.paths = paths

    def up(self, settings: LabSettings) -> bool:
        """Start the lab and return when every node is idle; False if it was up already.

        Of several concurrent callers one starts the lab; the others wait for it. If it does not
        start, none of its processes is left.
        """
        check_programs(accounting=settings.accounting, root=settings.root)
        _check_outside(state.surrounding_labs())
        with self._locked():
            if self._is_up_with(settings):
                return False
            try:
                start_lab(self.paths, settings)
            except BaseException:
                end_lab(self.paths)
                raise
        return True

    def down(self) -> int:
        """Kill all processes of the lab and remove its files; return how many were killed."""
        _check_outside(state.surrounding_labs() & {self.paths.token})
        try:
            if self.paths.root.is_dir():
                state.check_owner(self.paths.root)
            if not state.is_lab(self.paths):
                return state.kill_members(self.paths.token)
            with self._lock():
                killed = end_lab(self.paths)
                if state.is_lab(self.paths):  # Another 'down' may have been first.
                    state.remove_files(self.paths)
                self.paths.lock.unlink(missing_ok=True)
        except FileNotFoundError:
            # Another 'down' was first, and has removed the directory.
            return state.kill_members(self.paths.token)
        with suppress(OSError):
            self.paths.root.rmdir()  # Unless the user keeps other files there.
        return killed

    def status(self) -> state.LabStatus:
        return state.status_of(self.paths)

    def inside(self, argv: list[str]) -> list[str]:
        """Return ``argv`` as a command that runs inside the lab, on its host ``localhost``.

        Only there do srun and salloc listen where its nodes reach them, on 127.0.0.1.
        """
        return daemons.Host(self.paths, self.check_up().start).command(argv)

    def crash(self, node: str, *, daemon_only: bool = False) -> int:
        """Kill the processes of a node and set it down in Slurm; return how many were killed.

        With ``daemon_only`` only its slurmd is killed: its jobs continue, and Slurm notices by
        itself after SlurmdTimeout, 30 s.
        """
        self._check_node(node)
        self.paths.crashed.mkdir(exist_ok=True)
        (self.paths.crashed / node).touch()
        if daemon_only:
            return state.kill_members(self.paths.token, node, name="slurmd")
        killed = state.kill_members(self.paths.token, node)
        down = ("state=down", "reason=hpctk lab crash")
        ask(self.paths, "scontrol", "update", f"nodename={node}", *down)
        return killed

    def restore(self, node: str) -> None:
        """Start a crashed node again, as after a reboot, and return when it takes jobs."""
        _check_outside(state.surrounding_labs())
        record = self._check_node(node)
        state.kill_members(self.paths.token, node)
        daemons.start_slurmd(daemons.Host(self.paths, record.start, node)).wait()
        # Slurm refuses this after --daemon-only, because it has resumed the node by itself.
        with suppress(HpcToolkitError):
            ask(self.paths, "scontrol", "update", f"nodename={node}", "state=resume")
        (self.paths.crashed / node).unlink(missing_ok=True)
        wait_for_nodes(self.paths, (node,), {"idle", "mixed", "allocated"})

    def check_up(self) -> state.LabRecord:
        """Return the record of the lab; ConfigError unless it is up."""
        if self.paths.root.is_dir():
            # The lab's files can run code: slurm.conf names plugins, and a hosts file is mounted.
            state.check_owner(self.paths.root, others_of_root=True)
        now, record = self.status(), state.read_record(self.paths)
        if now.state != "up" or record is None:
            broken = now.state == "broken" and now.gone
            what = f"is broken: {', '.join(now.gone)} ended" if broken else "is not up"
            message = f"the lab in {self.paths.root} {what}"
            raise ConfigError(message, hint="start it with 'hpctk lab up'")
        if record.settings.root and os.geteuid() != 0:
            message = f"the lab in {self.paths.root} runs in {record.settings.root}"
            raise ConfigError(message, hint="only root can enter it; use sudo")
        return record

    def _check_node(self, node: str) -> state.LabRecord:
        record = self.check_up()
        state.check_owner(self.paths.root)
        names = record.settings.node_names
        if node not in names:
            raise ConfigError(f"the lab has no node {node!r}", hint=near_miss(node, list(names)))
        return record

    def _is_up_with(self, settings: LabSettings) -> bool:
        now = self.status()
        if now.state != "up":
            return False
        if now.settings != settings:
            kept = now.settings.words if now.settings else "others"
            message = f"the lab in {self.paths.root} is up with other settings: {kept}"
            hint = "'hpctk lab down' first, or choose another name with --name"
            raise ConfigError(message, hint=hint)
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lab's lock; create its directory."""
        while True:
            state.make_directory(self.paths)
            try:
                lock = self._lock()
                break
            except FileNotFoundError:
                continue  # A 'down' has just removed the directory.
        with lock:
            yield

    def _lock(self) -> AbstractContextManager[object]:
        """Take the lab's lock; leaving the returned context releases it.

        Raises FileNotFoundError if the lab's directory does not exist.
        """
        from filelock import FileLock, Timeout

        # Mode 0600, because any user that can open the file can hold the lock.
        lock = FileLock(self.paths.lock, timeout=_LOCK_S, mode=0o600)
        try:
            return lock.acquire()
        except Timeout:
            message = f"{self.paths.lock}: another hpctk process has held this lab for minutes"
            raise HpcToolkitError(message, hint="end that process, then try again") from None


def _check_outside(surrounding: set[str]) -> None:
    """Refuse to run in one of these labs: it would kill this process, or contain its children."""
    if surrounding:
        message = "this process runs inside a lab"
        raise ConfigError(message, hint="run the command in a shell outside the lab")


def start_lab(paths: LabPaths, settings: LabSettings) -> None:
    """Remove leftovers of an earlier start, then start every daemon and wait for the nodes.

    The caller holds the lab's lock, and kills the started processes if this raises.
    """
    end_lab(paths)
    state.remove_files(paths)
    # The end of a token depends on the directory, so that labs begin at different ports.
    port = daemons.free_block(ports_needed(settings), seed=int(paths.token[-8:], 16))
    record = state.LabRecord(settings, port, os.urandom(4).hex(), ready=False)
    state.write_record(paths, record)
    _write_files(paths, record)
    control = daemons.Host(paths, record.start)
    slurm = daemons.check_namespaces(control)
    _start_daemons(record, control)
    wait_for_nodes(paths, settings.node_names, {"idle"})
    state.write_record(paths, replace(record, ready=True, slurm=slurm))


def end_lab(paths: LabPaths) -> int:
    """Kill all processes of a lab; return their number. The caller holds the lab's lock."""
    # Without its hosts file, a process that is just being started fails; if it has mounted the
    # file already, it is found.
    shutil.rmtree(paths.hosts, ignore_errors=True)
    return state.kill_members(paths.token)


def _write_files(paths: LabPaths, record: state.LabRecord) -> None:
    settings, port, user = record.settings, record.port, daemons.user_name()
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
    hosts = hosts_text(settings, Path("/etc/hosts").read_text(errors="replace"))
    for node in (CONTROL, *settings.node_names):
        _write(paths.hosts_file(record.start, node), hosts.encode(), 0o644)
    first_job = first_job_id(time.time())
    slurm = slurm_conf(settings, paths, port=port, user=user, first_job=first_job)
    _write(paths.slurm_conf, slurm.encode(), 0o644)
    _write(paths.etc / "gres.conf", gres_conf(settings, paths).encode(), 0o644)
    _write(paths.cluster_file, cluster_toml(settings).encode(), 0o644)
    if settings.accounting:
        text = slurmdbd_conf(settings, paths, port=port, user=user)
        _write(paths.etc / "slurmdbd.conf", text.encode(), 0o600)
    if settings.root:
        _write_entrances(daemons.Host(paths, record.start), Path(settings.root))


def _write_entrances(control: daemons.Host, root: Path) -> None:
    """Write the scripts by which daemons and Slurm's commands run in a root."""
    paths = control.paths
    shared = [*machine_paths(), *interpreter_paths(root), paths.root, Path("/etc/hosts")]
    _write(paths.enter_root, entering(root, shared).encode(), 0o644)
    paths.clients.mkdir(mode=0o755)
    for name in CLIENTS:
        text = f'#!/bin/sh\nexec {shlex.join(control.command([name]))} "$@"\n'
        _write(paths.clients / name, text.encode(), 0o755)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Create a file with its mode from the first byte on, whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.fchmod(fd, mode)
        os.write(fd, data)
    finally:
        os.close(fd)


def _start_daemons(record: state.LabRecord, control: daemons.Host) -> None:
    daemons.start_munged(control).wait()
    if record.settings.accounting:
        daemons.start_database(control)
        daemons.start_slurmdbd(control)
        _check_listeners(record)
    daemons.start_slurmctld(control).wait()
    # Wait for slurmctld: a slurmd that cannot reach it retries only after a second.
    daemons.wait_for_daemon(
        control, "slurmctld", lambda: any(one.port == record.port for one in daemons.listeners())
    )
    hosts = [daemons.Host(control.paths, record.start, node) for node in record.settings.node_names]
    daemons.wait_for_all([daemons.start_slurmd(host) for host in hosts])
    _check_listeners(record)


def _check_listeners(record: state.LabRecord) -> None:
    """Refuse a lab of which other machines can reach a port."""
    block = range(record.port, record.port + ports_needed(record.settings))
    exposed = [one.port for one in daemons.listeners() if one.port in block and not one.loopback]
    if exposed:
        message = f"ports {exposed} of the lab could be reached from other machines"
        raise HpcToolkitError(message, hint="'hosts:' in /etc/nsswitch.conf must begin with files")


def wait_for_nodes(paths: LabPaths, nodes: tuple[str, ...], states: set[str]) -> None:
    """Wait until each node is in one of ``states``; an error has the end of a log."""
    deadline = time.monotonic() + _IDLE_S
    while True:
        now = node_states(paths)
        late = [node for node in nodes if now.get(node) not in states]
        if not late:
            return
        if gone := state.status_of(paths).gone:
            name, _, node = gone[0].partition(" of ")
            what = f"{gone[0]} ended"
            raise daemons.failure(what, paths.log(f"slurmd-{node}" if name == "slurmd" else name))
        if time.monotonic() > deadline:
            what = f"{late[0]} is {now.get(late[0], 'unknown')} after {_IDLE_S:.0f} s"
            raise daemons.failure(what, paths.log(f"slurmd-{late[0]}"), paths.log("slurmctld"))
        time.sleep(_PAUSE_S)
