"""A lab: up, down, how it stands, and its nodes' deaths on demand."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, HpcToolkitError, near_miss
from hpc_toolkit.lab import config, daemons
from hpc_toolkit.lab.directory import (
    LabRecord,
    make_directory,
    read_record,
    remove_files,
    write_record,
)
from hpc_toolkit.lab.members import kill_members, members
from hpc_toolkit.lab.packages import check_programs, program
from hpc_toolkit.lab.ports import free_block, listeners

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.lab.settings import LabPaths, LabSettings

_IDLE_S = 60.0
_LOCK_S = 180.0
_PAUSE_S = 0.05
_KEY_BYTES = 1024
# What an outer Slurm, or options meant for one, would change about a command given to the lab.
_FOREIGN = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_",
            "SCANCEL_", "SCONTROL_", "PMI_", "PMIX_")  # fmt: skip


@dataclass(frozen=True, slots=True)
class LabStatus:
    """How a lab stands."""

    state: str
    """``up``; ``broken``: some of its processes are gone; ``down``: none is left."""
    directory: str
    settings: LabSettings | None
    """None where no lab is recorded."""
    port: int | None
    """The first of its ports."""
    processes: int
    crashed: tuple[str, ...]
    """Nodes that were crashed on purpose and not restored."""
    gone: tuple[str, ...]
    """Daemons that should run and do not."""

    def to_json(self) -> dict[str, Any]:
        """The status as ``--json`` prints it."""
        return {
            "state": self.state,
            "directory": self.directory,
            "slurm_conf": str(Path(self.directory, "etc/slurm.conf")),
            "settings": self.settings.to_json() if self.settings else None,
            "port": self.port,
            "processes": self.processes,
            "crashed": list(self.crashed),
            "gone": list(self.gone),
        }


class Lab:
    """A private Slurm on this machine, in a directory of its own."""

    def __init__(self, paths: LabPaths) -> None:
        self.paths = paths

    def environment(self) -> dict[str, str]:
        """This process's environment for commands that shall speak with the lab."""
        own = {key: text for key, text in os.environ.items() if not key.startswith(_FOREIGN)}
        return {**own, "SLURM_CONF": str(self.paths.slurm_conf)}

    def up(self, settings: LabSettings) -> bool:
        """Start the lab and return when every node is idle; False if it was up already.

        What an earlier start left behind is cleaned up first. Of several callers at once one
        starts the lab; the others wait for it.

        Raises:
            ConfigError: it runs with other settings, programs are missing, or its directory is
                not safe.
            HpcToolkitError: it does not start; nothing of it is left running.
        """
        check_programs(accounting=settings.accounting)
        with self._locked():
            if self._is_up_with(settings):
                return False
            try:
                self._start(settings)
            except BaseException:
                kill_members(self.paths.token)
                raise
        return True

    def down(self) -> int:
        """End every process of the lab and remove its files; how many processes there were.

        Jobs end by SIGKILL. Nothing happens where there is no lab.

        Raises:
            HpcToolkitError: a process does not end.
        """
        if not self.paths.root.is_dir():
            return kill_members(self.paths.token)
        with self._locked():
            killed = kill_members(self.paths.token)
            if self.paths.record.exists():
                remove_files(self.paths)
            self.paths.lock.unlink(missing_ok=True)
        try:
            self.paths.root.rmdir()
        except OSError:
            return killed  # The user keeps other files there.
        return killed

    def status(self) -> LabStatus:
        """How the lab stands. Writes nothing and asks no daemon."""
        record = read_record(self.paths)
        found = members(self.paths.token)
        crashed = self._crashed()
        gone: tuple[str, ...] = ()
        if record is not None:
            present = {(one.node, one.name) for one in found}
            wanted = _daemons(record.settings, crashed)
            gone = tuple(
                f"{name} of {node}" for node, name in wanted if (node, name) not in present
            )
        whole = record is not None and record.ready and not gone
        state = "up" if whole else "broken" if found else "down"
        return LabStatus(
            state=state,
            directory=str(self.paths.root),
            settings=record.settings if record else None,
            port=record.port if record else None,
            processes=len(found),
            crashed=crashed,
            gone=gone,
        )

    def check_up(self) -> LabSettings:
        """The settings of the lab, if it is up.

        Raises:
            ConfigError: it is not.
        """
        now = self.status()
        if now.state != "up" or now.settings is None:
            what = f"is broken: {', '.join(now.gone)}" if now.gone else "is not up"
            message = f"the lab in {self.paths.root} {what}"
            raise ConfigError(message, hint="start it with 'hpctk lab up'")
        return now.settings

    def crash(self, node: str, *, daemon_only: bool = False) -> int:
        """Kill the processes of a node, and tell Slurm that it is down; how many were killed.

        With ``daemon_only`` only its slurmd is killed: its jobs run on, and Slurm notices by
        itself after SlurmdTimeout, 30 s.

        Raises:
            ConfigError: the lab is not up or has no such node.
        """
        self._check_node(node)
        self.paths.crashed.mkdir(exist_ok=True)
        (self.paths.crashed / node).touch()
        if daemon_only:
            return kill_members(self.paths.token, node, name="slurmd")
        killed = kill_members(self.paths.token, node)
        self._set_node(node, "state=down", "reason=hpctk lab crash")
        return killed

    def restore(self, node: str) -> None:
        """Start a crashed node again, as after a reboot, and return when it takes jobs.

        Raises:
            ConfigError: the lab is not up or has no such node.
            HpcToolkitError: the node does not come back.
        """
        self._check_node(node)
        kill_members(self.paths.token, node)
        record = read_record(self.paths)
        assert record is not None
        starting = daemons.start_slurmd(daemons.Host(self.paths, record.start, node))
        starting.wait()
        (self.paths.crashed / node).unlink(missing_ok=True)
        self._wait_for_nodes((node,), {"idle", "mixed", "allocated"})

    def ask(self, *argv: str) -> str:
        """What a Slurm command prints when the lab answers it.

        Raises:
            HpcToolkitError: it fails.
        """
        done = subprocess.run(
            [program(argv[0]), *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=self.environment(),
            check=False,
        )
        if done.returncode != 0:
            message = f"{argv[0]} failed: {' '.join(done.stderr.split())}"
            raise HpcToolkitError(message, hint=f"the logs are in {self.paths.logs}")
        return done.stdout

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only one who starts or ends this lab."""
        from filelock import FileLock, Timeout

        make_directory(self.paths)
        lock = FileLock(self.paths.lock, timeout=_LOCK_S)
        try:
            lock.acquire()
        except Timeout:
            message = f"{self.paths.lock}: another hpctk has been starting this lab for minutes"
            raise HpcToolkitError(message, hint="end that process, then try again") from None
        try:
            yield
        finally:
            lock.release()

    def _is_up_with(self, settings: LabSettings) -> bool:
        now = self.status()
        if now.state != "up":
            return False
        if now.settings != settings:
            message = f"the lab in {self.paths.root} is up with other settings: {now.settings}"
            raise ConfigError(message, hint="'hpctk lab down' first, or give a --name of its own")
        return True

    def _start(self, settings: LabSettings) -> None:
        paths = self.paths
        # First the hosts files, then the processes: one that another start was just making has
        # either seen its file, and is found, or finds none, and ends.
        remove_files(paths, keep_logs=True)
        kill_members(paths.token)
        remove_files(paths)
        port = free_block(config.ports_needed(settings), seed=int(paths.token[-8:], 16))
        record = LabRecord(settings, port, os.urandom(4).hex(), ready=False)
        write_record(paths, record)
        self._write_files(record)
        control = daemons.Host(paths, record.start)
        refusal = daemons.namespace_refusal(control)
        if refusal:
            message = f"no process can be made a host of its own here: {refusal}"
            hint = "a lab needs root, or a kernel that gives namespaces to users"
            raise HpcToolkitError(message, hint=hint)
        self._start_daemons(record, control)
        self._wait_for_nodes(settings.node_names, {"idle"})
        write_record(paths, LabRecord(settings, port, record.start, ready=True))

    def _write_files(self, record: LabRecord) -> None:
        paths, settings, user = self.paths, record.settings, daemons.user_name()
        for path, mode in (
            (paths.etc, 0o755), (paths.hosts, 0o755), (paths.devices, 0o755), (paths.run, 0o755),
            (paths.logs, 0o755), (paths.spool, 0o755), (paths.state, 0o700),
            (paths.munge, 0o711), (paths.munge_private, 0o700), (paths.database, 0o700),
        ):  # fmt: skip
            path.mkdir()
            path.chmod(mode)
        _write(paths.munge_private / "key", os.urandom(_KEY_BYTES), 0o600)
        for number in range(settings.gpus_per_node):
            _write(paths.devices / f"gpu{number}", b"", 0o644)
        hosts = config.hosts_text(settings, Path("/etc/hosts").read_text(errors="replace"))
        for node in (config.CONTROL, *settings.node_names):
            _write(paths.hosts_file(record.start, node), hosts.encode(), 0o644)
        port = record.port
        first_job = config.first_job_id(time.time())
        slurm = config.slurm_conf(settings, paths, port=port, user=user, first_job=first_job)
        _write(paths.slurm_conf, slurm.encode(), 0o644)
        _write(paths.etc / "gres.conf", config.gres_conf(settings, paths).encode(), 0o644)
        if settings.accounting:
            text = config.slurmdbd_conf(settings, paths, port=port, user=user)
            _write(paths.etc / "slurmdbd.conf", text.encode(), 0o600)

    def _start_daemons(self, record: LabRecord, control: daemons.Host) -> None:
        settings = record.settings
        daemons.start_munged(control).wait()
        if settings.accounting:
            from hpc_toolkit.lab.accounting import start_database, start_slurmdbd

            start_database(control)
            start_slurmdbd(control)
            self._check_listeners(record)
        hosts = [daemons.Host(self.paths, record.start, node) for node in settings.node_names]
        starting = [daemons.start_slurmctld(control), *map(daemons.start_slurmd, hosts)]
        for one in starting:
            one.wait()
        self._check_listeners(record)

    def _check_listeners(self, record: LabRecord) -> None:
        """Raise HpcToolkitError if a port of the lab can be reached from elsewhere."""
        block = range(record.port, record.port + config.ports_needed(record.settings))
        open_ports = [one.port for one in listeners() if one.port in block and not one.loopback]
        if open_ports:
            message = f"ports {open_ports} of the lab could be reached from other machines"
            raise HpcToolkitError(message, hint="check 'hosts:' in /etc/nsswitch.conf: files first")

    def _wait_for_nodes(self, nodes: tuple[str, ...], states: set[str]) -> None:
        deadline = time.monotonic() + _IDLE_S
        while True:
            late = self._nodes_not_in(states, nodes)
            if not late:
                return
            gone = self.status().gone
            if gone or time.monotonic() > deadline:
                what = (
                    f"{gone[0]} ended" if gone else f"{late[0]} takes no jobs after {_IDLE_S:.0f} s"
                )
                daemon, _, node = gone[0].partition(" of ") if gone else ("slurmd", "", late[0])
                log = f"slurmd-{node}" if daemon == "slurmd" else daemon
                raise daemons.failure(what, self.paths.log(log), self.paths.log("slurmctld"))
            time.sleep(_PAUSE_S)

    def _nodes_not_in(self, states: set[str], nodes: tuple[str, ...]) -> list[str]:
        try:
            text = self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T")
        except HpcToolkitError:
            return list(nodes)
        found = dict(line.split() for line in text.splitlines())
        return [node for node in nodes if found.get(node) not in states]

    def _crashed(self) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(self.paths.crashed)))
        except FileNotFoundError:
            return ()

    def _check_node(self, node: str) -> None:
        names = self.check_up().node_names
        if node not in names:
            message = f"the lab has no node {node!r}"
            raise ConfigError(message, hint=near_miss(node, list(names)))

    def _set_node(self, node: str, *settings: str) -> None:
        self.ask("scontrol", "update", f"nodename={node}", *settings)


def _daemons(settings: LabSettings, crashed: tuple[str, ...]) -> list[tuple[str, str]]:
    """(node, command) of every daemon that should run."""
    names = ["munged", "slurmctld", *(["mariadbd", "slurmdbd"] if settings.accounting else [])]
    nodes = [node for node in settings.node_names if node not in crashed]
    return [(config.CONTROL, name) for name in names] + [(node, "slurmd") for node in nodes]


def _write(path: Path, data: bytes, mode: int) -> None:
    """Create a file that nobody else can read before it has its mode."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        os.fchmod(fd, mode)
        os.write(fd, data)
    finally:
        os.close(fd)
