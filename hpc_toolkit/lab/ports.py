"""TCP ports on the loopback interface: find free ones, and list the listening sockets."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from hpc_toolkit.errors import ConfigError

FIRST_PORT = 17000
LAST_PORT = 65535
LOOPBACK = "127.0.0.1"
_LISTEN = "0A"
_LOOPBACK_HEX = "0100007F"


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
