"""The accounting of a lab: a MariaDB on its own socket, and slurmdbd, which stores jobs in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.lab.commands import finished
from hpc_toolkit.lab.config import CLUSTER_NAME
from hpc_toolkit.lab.daemons import daemon_environment, start, user_name, wait_for_daemon
from hpc_toolkit.lab.packages import program

if TYPE_CHECKING:
    from hpc_toolkit.lab.daemons import Host


def start_database(host: Host) -> None:
    """Create an empty database and start its server; only this user reaches it, by its socket.

    Raises:
        HpcToolkitError: the server does not start.
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
        # The database is deleted with the lab, so it need not survive a power loss.
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-buffer-pool-size=32M",
        "--skip-log-bin",
    ]
    # mariadbd stays in the foreground, so a shell starts it in the background and exits.
    shell = ["sh", "-c", '"$@" & ', "lab", program(server[0]), *server[1:]]
    start(host, "mariadbd", shell, log="mariadbd").wait()
    wait_for_daemon(host, "mariadbd", paths.database_socket.exists)


def start_slurmdbd(host: Host) -> None:
    """Start slurmdbd and add the lab's cluster to it.

    Raises:
        HpcToolkitError: slurmdbd does not start.
    """
    start(host, "slurmdbd", ["slurmdbd"], log="slurmdbd").wait()
    wait_for_daemon(host, "slurmdbd", lambda: _add_cluster(host))


def _add_cluster(host: Host) -> bool:
    """Return whether slurmdbd accepted the cluster; it fails while it creates its tables."""
    paths = host.paths
    argv = [program("sacctmgr"), "--immediate", "add", "cluster", CLUSTER_NAME]
    done = finished(argv, daemon_environment(paths), what="sacctmgr", logs=paths.logs)
    return done.returncode == 0
