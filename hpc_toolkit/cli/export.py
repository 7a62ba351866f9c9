"""Files for other programs that 'hpctk status' writes; imported only if one is requested."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from hpc_toolkit.cli.arguments import check_out, writing
from hpc_toolkit.results.prometheus import write_metrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpc_toolkit.results.status import Status


def prometheus_file(path: Path) -> Callable[..., None]:
    """A function that replaces a file by the metrics of the statuses that it is given.

    Raises ConfigError, before any run is read: the file cannot be written, or node_exporter would
    not read it.
    """
    check_out(path, (".prom",))

    def export(*found: Status) -> None:
        for one in found:
            one.run = os.path.abspath(one.run)  # so that labels do not depend on where it is called
        with writing(path):
            write_metrics(path, found, time.time())

    return export
