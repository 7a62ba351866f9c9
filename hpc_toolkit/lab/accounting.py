"""The accounting of a lab: a MariaDB on a socket of its own, and slurmdbd before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.lab.commands import finished
from hpc_toolkit.lab.config import CLUSTER_NAME
from hpc_toolkit.lab.daemons import daemon_environment, start, user_name, wait_for_daemon
from hpc_toolkit.lab.packages import program

if TYPE_CHECKING:
    from hpc_toolkit.lab.daemons import Host


def start_database(host: Host) -> None:
    """Make an empty database and start it: reached by its socket alone, by this user alone.

    Raises:
        HpcToolkitError: it does not start.
    """
    paths = host.paths
    user = user_name()
    data = f"--datadir={paths.database}/data"
    install = [
        "mariadb-install-db",
        "--no-defaults",
        data,
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
        f"--user={user}",
        "--skip-networking",
        f"--socket={paths.database_socket}",
        f"--pid-file={paths.run}/mariadbd.pid",
        f"--log-error={paths.log('mariadbd')}",
        # A trial's database is thrown away with the lab: it need not survive a power loss.
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-buffer-pool-size=32M",
        "--skip-log-bin",
    ]
    # It stays in the foreground of a shell that goes: nobody waits for it, as for a daemon.
    shell = ["sh", "-c", '"$@" & ', "lab", program(server[0]), *server[1:]]
    start(host, "mariadbd", shell, log="mariadbd").wait()
    wait_for_daemon(host, "mariadbd", paths.database_socket.exists)


def start_slurmdbd(host: Host) -> None:
    """Start slurmdbd and make the lab's cluster known to it.

    Raises:
        HpcToolkitError: it does not start.
    """
    start(host, "slurmdbd", ["slurmdbd"], log="slurmdbd").wait()
    wait_for_daemon(host, "slurmdbd", lambda: _add_cluster(host))


def _add_cluster(host: Host) -> bool:
    """Whether slurmdbd took the cluster; it knows nothing while it makes its tables."""
    paths = host.paths
    argv = [program("sacctmgr"), "--immediate", "add", "cluster", CLUSTER_NAME]
    done = finished(argv, daemon_environment(paths), what="sacctmgr", logs=paths.logs)
    return done.returncode == 0
