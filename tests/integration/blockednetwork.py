"""Processes that cannot use the network, and a list of their attempts."""

from __future__ import annotations

from pathlib import Path

from tests.documents import REPOSITORY

# Imported by every Python process, since it is on PYTHONPATH.
REFUSE = """
import os, sys

def refuse(event, arguments):
    address = arguments[1] if event == "socket.connect" else arguments[:2]
    if event in ("socket.connect", "socket.getaddrinfo") and isinstance(address, tuple):
        with open(os.environ["ATTEMPTS"], "a") as file:
            file.write(f"{address}\\n")
        raise OSError("the network is blocked")

sys.addaudithook(refuse)
"""


def block_network(directory: Path) -> dict[str, str]:
    """The environment of processes that import a module of ``directory`` that blocks them."""
    (directory / "blocked").mkdir()
    (directory / "blocked/sitecustomize.py").write_text(REFUSE)
    return {
        "PYTHONPATH": f"{directory}/blocked:{REPOSITORY}",
        "ATTEMPTS": str(directory / "attempts"),
    }


def attempts_of(directory: Path) -> list[str]:
    """The addresses that these processes tried to reach."""
    path = directory / "attempts"
    return path.read_text().splitlines() if path.exists() else []
