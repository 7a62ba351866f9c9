"""The counters of InfiniBand ports that the kernel shows below /sys/class/infiniband."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path("/sys/class/infiniband")
_WORD_BYTES = 4
"""``port_xmit_data`` and ``port_rcv_data`` count words (sysfs-class-infiniband of the kernel)."""
_COUNTERS = {"sent_bytes": "port_xmit_data", "received_bytes": "port_rcv_data"}


def read_ports(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return the bytes of every port since its reset, by ``device/port``; empty without ports."""
    found = {}
    for counters in sorted(root.glob("*/ports/*/counters")):
        port: dict[str, Any] = {}
        for name, file in _COUNTERS.items():
            # Reading a port that is down may fail.
            with suppress(OSError, ValueError):
                port[name] = int((counters / file).read_text(encoding="ascii")) * _WORD_BYTES
        if port:
            found[f"{counters.parts[-4]}/{counters.parts[-2]}"] = port
    return found
