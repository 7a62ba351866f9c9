"""``hpctk scaling collectives``: the bandwidth of the network, or a table of measured ones."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from hpc_toolkit.cli.arguments import argument, outputs, refuse_given, write_outputs
from hpc_toolkit.errors import HpcToolkitError, RunError
from hpc_toolkit.system.options import Option, flag
from hpc_toolkit.training.scaling.settings import DEFAULT_SIZES

OPTIONS = (
    Option("out", "Write .md or .json.", "FILE", short="-o"),
    flag("json", "Print JSON."),
    Option("world_size", "Number of ranks on this machine.", "N", default=2, least=2),
    Option("sizes", "Message sizes.", "SIZE,...", default=DEFAULT_SIZES),
    Option("collectives", "all, or e.g. all_reduce,all_gather.", "NAMES", default="all"),
    Option("iterations", "Measurements of each; the median is shown.", "N", default=20, least=1),
    Option("backend", "Backend. [default: nccl with GPUs, else gloo]", "nccl|gloo"),
)


def collectives(
    *,
    logs: Annotated[
        list[Path] | None, argument("[LOG]...", "Print the measurements in these logs.")
    ] = None,
    **given: Any,
) -> None:
    """Measure the bandwidth of collectives over message sizes.

    Bus bandwidths are computed as in nccl-tests.

    Examples:
        hpctk scaling collectives --world-size 4 --collectives all_reduce
    """
    from hpc_toolkit.training.scaling.collectives import as_markdown, records_in
    from hpc_toolkit.training.scaling.records import read_text

    as_json, out = given.pop("json"), given.pop("out")
    files = outputs([out] if out is not None else [], (".md", ".json"))
    if logs:
        refuse_given({"logs", "out", "json"}, "cannot be combined with LOGS")
        found = [one for path in logs for one in records_in(read_text(path))]
    else:
        found = _timed(**given)
    if not found:
        message = "no collective was measured"
        raise RunError(message, hint="name logs of 'hpctk scaling collectives'" if logs else "")
    data = json.dumps({"format": 1, "kind": "hpctk.collectives", "rows": found}) + "\n"
    page = as_markdown(found)
    sys.stdout.write(data if as_json else page)
    write_outputs(files, {".md": lambda: page, ".json": lambda: data})


def _timed(
    *, world_size: int, iterations: int, sizes: str, collectives: str, backend: str | None
) -> list[dict[str, Any]]:
    import tempfile

    from hpc_toolkit.training.scaling.collectives import (
        MODULE,
        parse_collectives,
        parse_sizes,
        records_in,
    )
    from hpc_toolkit.training.scaling.launches import launch_module
    from hpc_toolkit.training.scaling.records import read_text

    parse_sizes(sizes)
    parse_collectives(collectives)
    words = ("--sizes", sizes, "--collectives", collectives, "--iterations", str(iterations))
    directory = Path(tempfile.mkdtemp(prefix="hpctk-collectives-"))
    try:
        options = {"nproc_per_node": world_size, "redirects": "3"}
        launch_module(MODULE, words, options, directory, backend=backend)
    except HpcToolkitError:
        # The error names a log in it, unless no rank was started.
        with suppress(OSError):
            directory.rmdir()
        raise
    outputs = sorted(directory.glob("logs/*/rank-0.*.out"))
    found = [one for path in outputs for one in records_in(read_text(path))]
    shutil.rmtree(directory, ignore_errors=True)
    return found
