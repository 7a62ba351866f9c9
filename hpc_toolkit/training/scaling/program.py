"""The measured program: ``python -m hpc_toolkit.training.scaling.program``, on every rank.

``hpctk launch`` starts it. Rank 0 writes the records below ``-o DIR``. Without that option it
prints them on stdout, so that the log of a pod contains them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from hpc_toolkit.errors import PASSING, HpcToolkitError
from hpc_toolkit.system.processes import WARNING
from hpc_toolkit.system.terminal import show_error
from hpc_toolkit.training import distributed
from hpc_toolkit.training.distributed.group import DistributedInfo
from hpc_toolkit.training.scaling.measurement import measure
from hpc_toolkit.training.scaling.recorder import blank_record, job
from hpc_toolkit.training.scaling.records import (
    DIRECTORY,
    Record,
    identity,
    read_records,
    write_record,
)
from hpc_toolkit.training.scaling.settings import (
    OPTIONS,
    Case,
    Settings,
    Variation,
    cases,
    sample_cost_ms,
)
from hpc_toolkit.worker.code import collect_provenance

MODULE = "hpc_toolkit.training.scaling.program"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the training that the arguments describe, on this launch; return the exit code.

    It is 75 if the measurements so far are written, and the same command can make the others.
    """
    try:
        settings, variations, directory, cluster = parse(argv)
        return _measure_all(settings, variations, directory, place(cluster, os.environ))
    except HpcToolkitError as error:
        # Every rank prints this: the launcher shows the end of one log, not always rank 0's.
        show_error(error)
        return error.exit_code
    except OSError as error:
        if error.errno not in PASSING:
            raise
        # Not 75: a job would start again and again on a full disk.
        sys.stderr.write(f"error: {error.filename or 'a record'}: {error.strerror}\n")
        return 1


def parse(argv: Sequence[str] | None) -> tuple[Settings, list[Variation], Path | None, str]:
    """Return settings, variations, records' directory and cluster. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog=MODULE, allow_abbrev=False)
    for option, one in zip(OPTIONS, fields(Settings), strict=True):
        if not option.metavar:
            parser.add_argument(option.spelling, action="store_true", dest=one.name)
            continue
        kind = sample_cost_ms if one.name == "sample_cost_ms" else type(one.default)
        parser.add_argument(option.spelling, type=kind, default=one.default, dest=one.name)
    parser.add_argument("--vary", action="append", default=[])
    parser.add_argument("-o", "--out", type=Path, default=None)
    parser.add_argument("--cluster", default="")
    given = vars(parser.parse_args(argv))
    directory, cluster = given.pop("out"), given.pop("cluster")
    variations = [Variation.parse(text) for text in given.pop("vary")]
    return Settings(**given), variations, directory, cluster


def place(cluster: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the cluster, partition and job of this process for the record, as far as known.

    Outside a job only ``cluster`` counts: a laptop may be set up to render jobs for a cluster.
    """
    if environ.get("SLURM_JOB_ID") and not cluster:
        with suppress(HpcToolkitError):
            cluster = cluster_name(None)
    return job(cluster, environ)


def cluster_name(option: str | None) -> str:
    """Return what records call the cluster of a job; "" for one of which nothing is known.

    Raises ConfigError if the cluster cannot be loaded.
    """
    from hpc_toolkit.slurm.clusters.choice import FALLBACK, resolve_cluster

    site = resolve_cluster(option).cluster
    if site.name == FALLBACK:
        return ""
    named = site.argument or site.name
    return os.path.abspath(named) if "/" in named or named.endswith(".toml") else named


def _measure_all(
    settings: Settings,
    variations: Sequence[Variation],
    directory: Path | None,
    where: dict[str, str],
) -> int:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    chosen = cases(settings, variations)
    for case in chosen:
        case.settings.batch_per_rank(size)
    path = directory / DIRECTORY / f"world-{size}.jsonl" if directory is not None else None
    if path is not None and rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
    # Read the load before the ranks themselves add to it.
    load = os.getloadavg()[0]
    asked_to_leave: list[int] = []
    signal.signal(WARNING, lambda number, _: asked_to_leave.append(number))
    import torch

    with distributed.process_group() as info:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        found = read_records(directory) if directory is not None and info.is_main else []
        done = {identity(one) for one in found}
        for case in chosen:
            for repeat in range(settings.repeats):
                record = _blank(case, repeat, info)
                record["machine"] |= {"load": load, **where}
                if _agreed(info, identity(record) in done):
                    continue
                if _agreed(info, bool(asked_to_leave)):
                    return distributed.TRY_AGAIN
                record |= _measured(case.settings, info)
                if info.is_main:
                    made = collect_provenance(())
                    record |= {"commit": made["git_commit"], "hpctk": made["hpctk"]}
                    words = [sys.executable, "-m", MODULE, *sys.argv[1:]]
                    write_record({**record, "command": shlex.join(words)}, path)
    return 0


def _measured(settings: Settings, info: DistributedInfo) -> Record:
    """Return the numbers of one measurement, the same on every rank."""
    began = time.time()
    found = measure(settings, info)
    return {**found, "at": time.time(), "seconds": time.time() - began}


def _blank(case: Case, repeat: int, info: DistributedInfo) -> Record:
    import torch

    cuda = info.device.startswith("cuda")
    record = blank_record(
        info.world_size,
        nodes=-(-info.world_size // max(1, info.local_world_size)),
        repeat=repeat,
        settings=asdict(case.settings),
        device=torch.cuda.get_device_name(info.device) if cuda else "cpu",
    )
    record["machine"] |= {
        "threads": torch.get_num_threads(),
        "backend": info.backend or "none",
        "torch": torch.__version__,
    }
    return {**record, "variation": case.variation}


def _agreed(info: DistributedInfo, word: bool) -> bool:
    """Return whether ``word`` is true on any rank, so that all ranks take the same branch.

    Views of a directory differ between ranks.
    """
    import torch

    return bool(distributed.all_reduce(torch.tensor(float(word), device=info.device)).item())


if __name__ == "__main__":
    # The reader of stdout or stderr may be gone.
    with suppress(BrokenPipeError):
        distributed.leave(main())
