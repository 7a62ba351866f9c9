"""One Ray at a time on this machine, whichever tests start it."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from collections.abc import Iterator

_WAIT_S = 240.0


@contextmanager
def only_ray() -> Iterator[None]:
    """Wait for other tests' Ray to end: symmetric-run refuses a machine on which one runs."""
    pytest.importorskip("ray")
    with FileLock(Path(tempfile.gettempdir()) / "hpctk-ray-tests.lock", timeout=_WAIT_S):
        yield


def skip_beside_foreign_ray() -> None:
    """Skip where a Ray runs that is none of ours; tests of ours wait for each other."""
    for name in Path("/proc").glob("[0-9]*/comm"):
        try:
            foreign = name.read_text().strip() == "gcs_server"
        except OSError:
            continue
        if foreign:
            pytest.skip("a Ray runs on this machine, and symmetric-run refuses a second one")
