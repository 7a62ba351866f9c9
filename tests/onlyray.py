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
    """Wait until other tests' Ray has ended."""
    pytest.importorskip("ray")
    with FileLock(Path(tempfile.gettempdir()) / "hpctk-ray-tests.lock", timeout=_WAIT_S):
        yield
