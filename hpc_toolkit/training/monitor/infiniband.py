"""The counters of InfiniBand ports, as the kernel shows them below /sys/class/infiniband."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path("/sys/class/infiniband")
_WORD_BYTES = 4
"""``port_xmit_data`` and ``port_rcv_data`` count words (sysfs-class-infiniband of the kernel)."""
_COUNTERS = {"sent_bytes": "port_xmit_data", "received_bytes": "port_rcv_data"}


def read_ports(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Bytes of every port since it was reset, by ``device/port``; empty where there is none."""
    found = {}
    for counters in sorted(root.glob("*/ports/*/counters")):
        port: dict[str, Any] = {}
        for name, file in _COUNTERS.items():
            # A port that is down may refuse.
            with suppress(OSError, ValueError):
                port[name] = int((counters / file).read_text(encoding="ascii")) * _WORD_BYTES
        if port:
            found[f"{counters.parts[-4]}/{counters.parts[-2]}"] = port
    return found
