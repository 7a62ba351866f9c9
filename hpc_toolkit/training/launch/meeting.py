"""Where ranks and nodes meet: torch's key-value stores, and node 0's address in the run directory.

``python -Pm hpc_toolkit.training.launch.meeting PARENT FD TIMEOUT NAME`` serves a store on a
listening socket until its parent ends, then removes the symlink NAME, unless it is empty. It is a
process of its own, since the import of torch takes seconds: the ranks start at the same time.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hpc_toolkit.errors import RunError
from hpc_toolkit.rundir import files
from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.system.quantities import format_duration

_SHORTEST_S = 0.05
_LONGEST_S = 1.0
_BACKLOG = 4096
_ENDED = signal.SIGRTMIN
"""Signal that tells the store's process that its parent has ended."""


class Address(NamedTuple):
    """Address on which a store listens."""

    host: str
    """A host name or IP address that the other nodes can resolve."""
    port: int

    def __str__(self) -> str:
        """Return the address as it is published: HOST:PORT, split at the last colon."""
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse the output of :meth:`__str__`. Raises RunError if the text is not an address."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit():
            message = f"{text!r} is not the address of a node"
            raise RunError(message, hint="remove that name below rendezvous/ and start again")
        return cls(host, int(port))


def open_store(address: Address, timeout_s: float, *, serve: bool, fd: int | None = None) -> Any:
    """Connect to torch's key-value store, or serve it here, on the listening socket ``fd`` if any.

    Raises RuntimeError if it is not reached, or cannot be served at this port.
    """
    from datetime import timedelta

    # A handler that raises inside numpy's import would leave it unusable in this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    limit = timedelta(seconds=timeout_s)
    return TCPStore(*address, None, serve, limit, False, master_listen_fd=fd)


def serve_apart(
    host: str, timeout_s: float, name: Path | str = ""
) -> tuple[Address, subprocess.Popen[bytes]]:
    """Take a port and serve a store there from a child, while this process lives.

    ``host`` is "" for all interfaces; ``name`` is a published symlink that the child removes.
    """
    with socket.create_server((host, 0), backlog=_BACKLOG) as listener:
        fd = listener.fileno()
        argv = [sys.executable, "-Pm", __name__, str(os.getpid()), str(fd), str(timeout_s)]
        # The child keeps the block: Slurm sends warnings to every process of a step, and a terminal
        # its ^C, but the store must outlive the ranks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            child = subprocess.Popen(
                [*argv, str(name)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(fd,),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Address(host, listener.getsockname()[1]), child


def main(argv: list[str]) -> int:
    """Serve a store until the parent ends."""
    parent, fd, timeout_s, name = int(argv[1]), int(argv[2]), float(argv[3]), argv[4]
    die_with_parent()
    listener = socket.socket(fileno=fd)
    port = listener.getsockname()[1]
    store = open_store(Address("127.0.0.1", port), timeout_s, serve=True, fd=listener.detach())
    # A reader of the parent's stderr would wait until this process has closed it, too.
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    die_with_parent(_ENDED)
    while os.getppid() == parent and signal.sigtimedwait({_ENDED}, 60) is None:
        pass
    # Do not remove the name of another launch, which can be there if ours was removed.
    if name and os.readlink(name) == str(Address(own_host(), port)):
        os.unlink(name)
    del store
    return 0


def publish(path: Path, address: Address) -> None:
    """Publish the address where this launch meets as the target of a symlink.

    Raises RunError if another launch has published under this name, or it is not a symlink.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        there = files.create_name(path, str(address))
    except OSError as error:
        raise _foreign(path, error) from error
    if there != str(address):
        message = f"{path} is taken: another launch of this name listens at {there}"
        raise RunError(message, hint="give each launch its own --rdzv-id")


def find(
    path: Path,
    *,
    timeout_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Address:
    """Wait until node 0 has published its address.

    Raises RunError if it did not within ``timeout_s``.
    """
    for _ in _polls(timeout_s, monotonic, sleep):
        # NFS caches that a name does not exist for as long as the directory seems unchanged;
        # opening the directory asks the server again.
        with suppress(OSError):
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
        try:
            if target := os.readlink(path):
                return Address.parse(target)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _foreign(path, error) from error
    message = f"node 0 did not publish its address as {path} within {format_duration(timeout_s)}"
    hint = "check that all nodes share the run directory; --start-timeout waits longer"
    raise RunError(message, hint=hint)


def _polls(
    timeout_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Yield until ``timeout_s`` have passed, at least once, with pauses that grow to a second."""
    end, pause = monotonic() + timeout_s, _SHORTEST_S
    yield
    while (left_s := end - monotonic()) > 0:
        sleep(min(pause, left_s))
        pause = min(2 * pause, _LONGEST_S)
        yield


def _foreign(path: Path, error: OSError) -> Exception:
    """Return the error for a name that cannot be read, with a hint if it is not a symlink."""
    if error.errno != errno.EINVAL:
        return error
    return RunError(f"{path} is not a symlink", hint="remove that name, and start again")


def own_host(environ: Mapping[str, str] = os.environ) -> str:
    """Return a host name or IP address under which other nodes can reach this one.

    It is the first of Slurm's node name and the kernel's host names that resolves here, else the
    IP address of the interface that leads outside.
    """
    for name in (environ.get("SLURMD_NODENAME"), socket.gethostname(), socket.getfqdn()):
        if name and resolves(name):
            return name
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only chooses the interface.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def wait_for_listener(address: Address, *, timeout_s: float) -> None:
    """Wait until node 0 listens at ``address``.

    Raises RunError if it does not within ``timeout_s``.
    """
    why: object = ""
    for _ in _polls(timeout_s):
        try:
            socket.create_connection(address, timeout=max(0.1, min(5.0, timeout_s))).close()
        except OSError as error:
            why = error.strerror or error
        else:
            return
    message = f"node 0 does not listen at {address} after {format_duration(timeout_s)}: {why}"
    raise RunError(message, hint="check host, port and firewall")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
