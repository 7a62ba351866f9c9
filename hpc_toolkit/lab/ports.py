"""TCP ports on the loopback interface: which are free, and who listens where."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST_PORT = 17000
LAST_PORT = 65535
LOOPBACK = "127.0.0.1"
_LISTEN = "0A"
_LOOPBACK_HEX = "0100007F"


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that waits for connections."""

    port: int
    loopback: bool
    """Whether it can be reached from this machine alone, by 127.0.0.1."""


def free_block(count: int, *, seed: int, spans: Iterable[range] | None = None) -> int:
    """The first of ``count`` consecutive ports on which nobody listens, at any address.

    The search begins at a place that ``seed`` decides, so that labs started at the same moment
    meet rarely. It goes through ``spans``, by default those of ``port_spans()``.

    Raises:
        ConfigError: there is no such block.
    """
    # Slurm could bind beside a listener at another address, which then seemed to be the lab's.
    taken = {one.port for one in listeners()}
    for span in spans if spans is not None else port_spans():
        places = len(span) // count
        for step in range(places):
            first = span.start + (seed + step) % places * count
            block = range(first, first + count)
            if taken.isdisjoint(block) and all(map(is_free, block)):
                return first
    message = f"no {count} consecutive free ports between {FIRST_PORT} and {LAST_PORT}"
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


def port_spans() -> list[range]:
    """Where to look for ports: below and above those that the kernel gives to outgoing
    connections, then among these: ip(7), ip_local_port_range.
    """
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        low, high = map(int, text.split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    below = range(FIRST_PORT, min(low, LAST_PORT + 1))
    above = range(max(high + 1, FIRST_PORT), LAST_PORT + 1)
    return [below, above, range(FIRST_PORT, LAST_PORT + 1)]


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
