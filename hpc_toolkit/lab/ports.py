"""TCP ports on the loopback interface: which are free, and who listens where."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from hpc_toolkit.errors import ConfigError

FIRST_PORT = 17000
LOOPBACK = "127.0.0.1"
_LISTEN = "0A"
_LOOPBACK_HEX = "0100007F"


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that waits for connections."""

    port: int
    loopback: bool
    """Whether it can be reached from this machine alone, by 127.0.0.1."""


def free_block(count: int, *, seed: int, last: int | None = None) -> int:
    """The first of ``count`` consecutive ports that are free on 127.0.0.1 at this moment.

    The search begins at a place that ``seed`` decides, so that labs started at the same moment
    meet rarely; it stays below the ports that the kernel gives to outgoing connections.

    Raises:
        ConfigError: there is no such block.
    """
    last = last if last is not None else _first_ephemeral() - 1
    places = (last - FIRST_PORT + 1) // count
    for step in range(max(places, 0)):
        first = FIRST_PORT + (seed + step) % places * count
        if all(is_free(port) for port in range(first, first + count)):
            return first
    message = f"no {count} consecutive free ports between {FIRST_PORT} and {last}"
    raise ConfigError(message, hint="ask for fewer --nodes, or take other labs down")


def is_free(port: int) -> bool:
    """Whether a daemon could listen on this port of 127.0.0.1 at this moment."""
    # As Slurm binds: connections that linger after their end do not count.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _first_ephemeral() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        return int(text.split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def own_address() -> str:
    """What this machine's name means to it; its name where that means nothing.

    srun and salloc listen there, whatever their lab listens on.
    """
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


def listeners() -> list[Listener]:
    """All TCP sockets of this machine that listen."""
    found: list[Listener] = []
    for name in ("tcp", "tcp6"):
        try:
            text = Path("/proc/net", name).read_text(encoding="ascii")
        except OSError:
            continue
        found += parse_listeners(text)
    return found


def parse_listeners(text: str) -> list[Listener]:
    """The listening sockets in /proc/net/tcp or tcp6."""
    found = []
    for line in text.splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        address, _, port = local.partition(":")
        if state == _LISTEN:
            found.append(Listener(int(port, 16), address == _LOOPBACK_HEX))
    return found
