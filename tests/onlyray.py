"""Makes sure that tests start only one Ray at a time on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

_WAIT_S = 240.0


@contextmanager
def only_ray() -> Iterator[None]:
    """Wait until other tests' Ray has ended: symmetric-run refuses to start beside another Ray."""
    pytest.importorskip("ray")
    with FileLock(Path(tempfile.gettempdir()) / "hpctk-ray-tests.lock", timeout=_WAIT_S):
        yield


def skip_beside_foreign_ray() -> None:
    """Skip the test if a foreign Ray runs; our own tests wait for each other."""
    for name in Path("/proc").glob("[0-9]*/comm"):
        try:
            foreign = name.read_text().strip() == "gcs_server"
        except OSError:
            continue
        if foreign:
            pytest.skip("a Ray runs on this machine, and symmetric-run refuses a second one")
