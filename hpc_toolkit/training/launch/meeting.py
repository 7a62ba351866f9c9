"""Where node 0 is: an address that it publishes in the run directory, and the others read."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.errors import HpcToolkitError, RunError
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_SHORTEST_S = 0.05
_LONGEST_S = 1.0


class Address(NamedTuple):
    """Where a store listens."""

    host: str
    """A name or a number that the other nodes can resolve."""
    port: int

    def __str__(self) -> str:
        """As it is published; the port is what follows the last colon."""
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read what :meth:`__str__` wrote.

        Raises:
            RunError: it is something else.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit():
            message = f"{text!r} is no address of a node"
            raise RunError(message, hint="remove that name below rendezvous/ and start again")
        return cls(host, int(port))


class NodesMissingError(HpcToolkitError):
    """Not all nodes came in time."""


def publish(run_dir: Path, name: str, address: Address) -> Path:
    """Say where this launch meets; the name that was made.

    Raises:
        RunError: somebody else has published under this name.
    """
    directory = run_dir / "rendezvous"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    try:
        there = files.create_name(path, str(address))
    except OSError as error:
        raise _foreign(path, error) from error
    if there != str(address):
        message = f"{path} is taken: another launch of this name listens at {there}"
        raise RunError(message, hint="give every launch an --rdzv-id of its own")
    return path


def find(
    run_dir: Path,
    name: str,
    *,
    timeout_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Address:
    """Wait until node 0 has published.

    Raises:
        NodesMissingError: it did not within ``timeout_s``.
    """
    path = run_dir / "rendezvous" / name
    end = monotonic() + timeout_s
    pause = _SHORTEST_S
    while True:
        # NFS remembers that a name was not there for as long as the directory seems unchanged;
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
        if monotonic() >= end:
            message = f"node 0 did not publish its address as {path} within {timeout_s:g} s"
            hint = "is the run directory the same on all nodes? --start-timeout waits longer"
            raise NodesMissingError(message, hint=hint)
        sleep(min(pause, max(0.0, end - monotonic())))
        pause = min(2 * pause, _LONGEST_S)


def _foreign(path: Path, error: OSError) -> Exception:
    """What to raise where a name cannot be read: what to do, where something else has it."""
    if error.errno != errno.EINVAL:
        return error
    return RunError(f"{path} is no symlink", hint="remove that name, and start again")


def own_host(given: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """A name or a number under which other nodes can reach this one.

    What the user gave, else Slurm's name of the node, else the kernel's, whichever can be resolved
    here, else the number of the interface that leads outside.
    """
    if given:
        return given
    for name in (environ.get("SLURMD_NODENAME"), socket.gethostname(), socket.getfqdn()):
        if name and resolves(name):
            return name
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only chooses the interface.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def resolves(name: str) -> bool:
    """Whether this host knows an address of ``name``."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def wait_for_listener(address: Address, *, timeout_s: float) -> None:
    """Wait until somebody listens at an address.

    Raises:
        NodesMissingError: nobody does within ``timeout_s``.
    """
    end = time.monotonic() + timeout_s
    pause = _SHORTEST_S
    while True:
        try:
            socket.create_connection(address, timeout=max(0.1, min(5.0, timeout_s))).close()
        except OSError as error:
            if time.monotonic() >= end:
                why = error.strerror or error
                message = f"node 0 does not listen at {address} after {timeout_s:g} s: {why}"
                hint = "are name and port right, and may this node connect there?"
                raise NodesMissingError(message, hint=hint) from error
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
