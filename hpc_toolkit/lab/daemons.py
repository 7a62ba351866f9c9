"""Find ports for the daemons of a lab, and start each daemon as on a separate host.

In its UTS and mount namespaces a daemon has the host name of its node, and a hosts file in which
every name of the lab is 127.0.0.1. Slurm listens on the address of its host name, so it listens
there only. An ordinary user gets these namespaces inside a user namespace (user_namespaces(7)).
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.lab.commands import finished, search_path
from hpc_toolkit.lab.settings import CLUSTER_NAME, CONTROL, LOOPBACK, LabPaths
from hpc_toolkit.lab.state import LOOKS, members

FIRST_PORT = 17000
LAST_PORT = 65535
_LISTEN = "0A"
_LOOPBACK_HEX = "0100007F"
_START_S = 60.0
_READY_S = 90.0
_PAUSE_S = 0.01
_TAIL_LINES = 15

# Arguments: hosts file, host name, directory of devices, directory of clients, then the command.
# Slurm accepts only character devices as GPUs, so each file in the first directory becomes
# /dev/null, which needs no root. Clients that enter the lab are hidden from processes inside.
_ENTER = """
set -eu
mount --bind "$1" /etc/hosts
hostname "$2"
for device in "$3"/*; do
  if [ -f "$device" ]; then mount --bind /dev/null "$device"; fi
done
if [ -d "$4" ]; then mount -t tmpfs tmpfs "$4"; fi
shift 4
exec "$@"
"""

# On 'scontrol reconfigure', Slurm 23.11 and newer execute the path by which they were started.
_BY_PATH = 'exec "$(command -v "$0")" "$@"'


class NamespaceError(HpcToolkitError):
    """This user cannot create the namespaces of a lab's host on this machine."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the lab, as its processes see it."""

    paths: LabPaths
    start: str
    """Id of the lab's start, in the names of its hosts files; a later start removes them."""
    node: str = CONTROL

    def command(self, argv: list[str]) -> list[str]:
        """Return ``argv`` as a command that runs on this host."""
        hosts = self.paths.hosts_file(self.start, self.node)
        directories = [str(self.paths.devices), str(self.paths.clients)]
        enter = ["sh", "-c", _ENTER, "lab", str(hosts), self.node, *directories]
        if self.paths.enter_root.exists():
            enter += ["sh", str(self.paths.enter_root)]
        if os.geteuid() == 0:
            return ["unshare", "--uts", "--mount", *enter, *argv]
        own = ["unshare", "--user", "--map-current-user", "--keep-caps", "--uts", "--mount"]
        # Daemons and their jobs must not keep the capabilities that the mounts needed.
        drop = ["setpriv", "--inh-caps=-all", "--ambient-caps=-all", "--"]
        return [*own, *enter, *drop, *argv]


def user_name() -> str:
    """The user that daemons run as: the name, or the UID of a user without a name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def daemon_environment(paths: LabPaths) -> dict[str, str]:
    return {
        "PATH": search_path(),
        "LC_ALL": "C.UTF-8",
        "SLURM_CONF": str(paths.slurm_conf),
        "MYSQL_UNIX_PORT": str(paths.database_socket),
    }


def check_namespaces(host: Host) -> str:
    """Return the version of Slurm on a lab's host.

    Raises NamespaceError, with the kernel's reason, if this user cannot make such a host.
    """
    command = host.command(["slurmctld", "-V"])
    done = finished(host.paths, *command, environ=daemon_environment(host.paths))
    if done.code != 0:
        why = " ".join(done.stderr.split())
        if host.paths.enter_root.exists():
            message = f"slurmctld does not run in the lab's root: {why}"
            raise NamespaceError(message, hint="try 'slurmctld -V' there, with chroot")
        if "cannot change root filesystem propagation" in why:
            message = "namespaces for the lab's hosts cannot be created: / is not a mount point"
            hint = "in a chroot: leave it, run 'mount --bind DIR DIR' and enter it again"
            raise NamespaceError(message, hint=hint)
        message = f"namespaces for the lab's hosts cannot be created: {why}"
        hint = "a lab needs root with CAP_SYS_ADMIN, or a kernel with user namespaces"
        raise NamespaceError(message, hint=hint)
    return done.stdout.strip().rpartition(" ")[2]


@dataclass(slots=True)
class Starting:
    """A daemon, or a program that prepares one, that was started but may not be ready yet."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    output: Path
    """File for its output before it opens its log."""

    def wait(self) -> None:
        """Wait until the program has exited, or a daemon is in the background."""
        try:
            code = self.process.wait(_START_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = -1
        if code != 0:
            raise failure(f"{self.name} did not start", self.log, self.output)


def wait_for_all(starting: list[Starting]) -> None:
    """Wait for all of them, then raise the error of the first that failed."""
    failures = []
    for one in starting:
        try:
            one.wait()
        except HpcToolkitError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def start(host: Host, name: str, argv: list[str], *, log: str) -> Starting:
    """Start a program that ends when it is done, or moves to the background by itself."""
    output = host.paths.logs / f"{log}.start"
    with output.open("wb") as out:
        process = subprocess.Popen(
            host.command(["sh", "-c", _BY_PATH, *argv]),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=host.paths.root,
            env=daemon_environment(host.paths),
            umask=0o022,
            start_new_session=True,
        )
    return Starting(name, host.paths.log(log), process, output)


def start_munged(host: Host) -> Starting:
    """Start the lab's own munged; its key authenticates users to the lab's daemons."""
    paths = host.paths
    argv = [
        "munged",
        # munged expects that all users may enter every directory above its files.
        "--force",
        f"--socket={paths.munge_socket}",
        f"--key-file={paths.munge_private}/key",
        f"--seed-file={paths.munge_private}/seed",
        f"--pid-file={paths.run}/munged.pid",
        f"--log-file={paths.log('munged')}",
    ]
    return start(host, "munged", argv, log="munged")


def start_slurmctld(host: Host) -> Starting:
    """Start the controller, without the state of earlier jobs."""
    argv = ["slurmctld", "-c", "-f", str(host.paths.slurm_conf)]
    return start(host, "slurmctld", argv, log="slurmctld")


def start_slurmd(host: Host) -> Starting:
    argv = ["slurmd", "-N", host.node, "-f", str(host.paths.slurm_conf)]
    return start(host, f"slurmd of {host.node}", argv, log=f"slurmd-{host.node}")


def wait_for_daemon(host: Host, name: str, ready: Callable[[], bool]) -> None:
    """Wait until a daemon in the background of this host is ready; else show its log."""
    deadline = time.monotonic() + _READY_S
    missed = 0
    while not ready():
        alive = any(one.name == name for one in members(host.paths.token, host.node))
        missed = 0 if alive else missed + 1
        if missed == LOOKS or time.monotonic() > deadline:
            raise failure(f"{name} {'does not answer' if alive else 'ended'}", host.paths.log(name))
        time.sleep(_PAUSE_S)


def failure(what: str, *logs: Path) -> HpcToolkitError:
    """Build an error with the last lines of the first log that is not empty."""
    for log in logs:
        try:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        if lines:
            tail = "\n  ".join(lines[-_TAIL_LINES:])
            return HpcToolkitError(f"{what}:\n  {tail}", hint=f"see the whole log in {log}")
    return HpcToolkitError(what, hint=f"its log {logs[0]} is empty")


def start_database(host: Host) -> None:
    """Create an empty database and start its server; only this user reaches it, by its socket."""
    paths = host.paths
    user = user_name()
    data = f"--datadir={paths.database}/data"
    # Each server deletes all files '#sql*' of its directory for temporary files when it starts.
    paths.database_temporary.mkdir(mode=0o700)
    temporary = f"--tmpdir={paths.database_temporary}"
    install = [
        "mariadb-install-db",
        "--no-defaults",
        data,
        temporary,
        f"--user={user}",
        "--auth-root-authentication-method=socket",
        f"--auth-root-socket-user={user}",
        "--skip-test-db",
    ]
    start(host, "mariadb-install-db", install, log="mariadb-install").wait()
    server = [
        "mariadbd",
        "--no-defaults",
        data,
        temporary,
        f"--user={user}",
        "--skip-networking",
        f"--socket={paths.database_socket}",
        f"--pid-file={paths.run}/mariadbd.pid",
        f"--log-error={paths.log('mariadbd')}",
        # The database is deleted with the lab, so it need not survive a power loss.
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-buffer-pool-size=32M",
        "--skip-log-bin",
        # By TLS, which adds nothing to a socket, slurmdbd cannot use MariaDB 11.8.9: error 5027.
        "--skip-ssl",
    ]
    # mariadbd stays in the foreground, so a shell starts it in the background and exits.
    shell = ["sh", "-c", '"$@" & ', "lab", *server]
    start(host, "mariadbd", shell, log="mariadbd").wait()
    wait_for_daemon(host, "mariadbd", paths.database_socket.exists)


def start_slurmdbd(host: Host) -> None:
    """Start slurmdbd and add the lab's cluster to it."""
    start(host, "slurmdbd", ["slurmdbd"], log="slurmdbd").wait()
    wait_for_daemon(host, "slurmdbd", lambda: _add_cluster(host))


def _add_cluster(host: Host) -> bool:
    """Whether slurmdbd accepted the cluster; it fails while it creates its tables."""
    argv = ["sacctmgr", "--immediate", "add", "cluster", CLUSTER_NAME]
    return finished(host.paths, *argv, environ=daemon_environment(host.paths)).code == 0


@dataclass(frozen=True, slots=True)
class Listener:
    port: int
    loopback: bool
    """Whether it listens on 127.0.0.1, where only this machine reaches it."""


def free_block(count: int, *, seed: int) -> int:
    """Return the first of ``count`` consecutive ports on which nothing listens, at any address.

    The search starts at a position that depends on ``seed``, so that labs started at the same
    time rarely collide.
    """
    # Slurm could bind a port with a listener at another address, which would pass for the lab's.
    taken = {one.port for one in listeners()}
    for span in port_spans():
        places = len(span) // count
        for step in range(places):
            first = span.start + (seed + step) % places * count
            block = range(first, first + count)
            if taken.isdisjoint(block) and all(map(is_free, block)):
                return first
    message = f"no {count} consecutive free ports between {FIRST_PORT} and {LAST_PORT}"
    raise ConfigError(message, hint="use fewer --nodes, or stop other labs")


def is_free(port: int) -> bool:
    """Return whether a daemon could listen on this port of 127.0.0.1 now."""
    # SO_REUSEADDR as in Slurm, so that lingering old connections do not block the port.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def port_spans() -> list[range]:
    """The ranges of ports to search: first those that no outgoing connection gets."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        low, high = map(int, text.split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    below = range(FIRST_PORT, min(low, LAST_PORT + 1))
    above = range(max(high + 1, FIRST_PORT), LAST_PORT + 1)
    return [below, above, range(FIRST_PORT, LAST_PORT + 1)]


def own_address() -> str:
    """The address of this machine's host name; the name itself if it does not resolve.

    srun and salloc listen there, whatever address their lab's daemons use.
    """
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


def listeners() -> list[Listener]:
    found: list[Listener] = []
    for name in ("tcp", "tcp6"):
        try:
            text = Path("/proc/net", name).read_text(encoding="ascii")
        except OSError:
            continue
        found += parse_listeners(text)
    return found


def parse_listeners(text: str) -> list[Listener]:
    """Parse the listening sockets from /proc/net/tcp or tcp6."""
    found = []
    for line in text.splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        address, _, port = local.partition(":")
        if state == _LISTEN:
            found.append(Listener(int(port, 16), address == _LOOPBACK_HEX))
    return found
