"""The measured program: ``python -m hpc_toolkit.scaling.program``, on every rank.

``hpctk launch`` starts it. Rank 0 writes the records: below ``-o DIR``, else to stdout, which is
how the log of a pod comes to hold them.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import sys
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit import files
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.ranks import host_name
from hpc_toolkit.scaling.records import DIRECTORY, FORMAT, KIND, identity
from hpc_toolkit.scaling.settings import Settings, Variation, cases
from hpc_toolkit.scaling.sources import read_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.distributed.place import DistributedInfo
    from hpc_toolkit.scaling.records import Record

EXIT_LATER = 75
"""What was measured is written, and the rest can be measured by the same call."""

MONITOR_INTERVAL_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the arguments say at the world size of this launch; the exit code."""
    try:
        settings, variations, directory = parse(argv)
        return _measure_all(settings, variations, directory)
    except HpcToolkitError as error:
        # By every rank: the launcher shows the end of one log, and not always that of rank 0.
        sys.stderr.write(f"error: {error.message}\n")
        sys.stderr.write(f"hint: {error.hint}\n" if error.hint else "")
        return error.exit_code


def parse(argv: Sequence[str] | None) -> tuple[Settings, list[Variation], Path | None]:
    """Settings, what varies, and the directory of the records. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="hpc_toolkit.scaling.program", allow_abbrev=False)
    for one in fields(Settings):
        name = f"--{one.name.replace('_', '-')}"
        if isinstance(one.default, bool):
            parser.add_argument(name, action="store_true", dest=one.name)
        else:
            parser.add_argument(name, type=type(one.default), default=one.default, dest=one.name)
    parser.add_argument("--vary", action="append", default=[])
    parser.add_argument("-o", "--out", type=Path, default=None)
    given = vars(parser.parse_args(argv))
    directory = given.pop("out")
    variations = [Variation.parse(text) for text in given.pop("vary")]
    return Settings(**given), variations, directory


def _measure_all(
    settings: Settings, variations: Sequence[Variation], directory: Path | None
) -> int:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    chosen = cases(settings, variations)
    for case in chosen:
        case.settings.batch_per_rank(size)
        case.settings.decoder()
    if directory is not None and rank == 0:
        (directory / DIRECTORY).mkdir(parents=True, exist_ok=True)
    # Before the ranks themselves make any.
    load = os.getloadavg()[0]
    asked_to_leave: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked_to_leave.append(number))
    # Before torch is imported, because the monitor's child is forked.
    with monitored(directory, size) as samples:
        import torch

        from hpc_toolkit.distributed.group import process_group

        with process_group() as info:
            if settings.threads:
                torch.set_num_threads(settings.threads)
            done = _done(directory, size) if info.is_main else set()
            for case in chosen:
                for repeat in range(settings.repeats):
                    record = _blank(case.settings, case.variation, repeat, info, load)
                    known = info.is_main and identity(record) in done
                    if _agreed(info, known):
                        continue
                    if _agreed(info, bool(asked_to_leave)):
                        return EXIT_LATER
                    _measure(record, case.settings, info, directory, samples)
    return 0


def _measure(
    record: Record,
    settings: Settings,
    info: DistributedInfo,
    directory: Path | None,
    samples: Path | None,
) -> None:
    import time

    from hpc_toolkit.scaling.measurement import measure

    before = _sample_count(samples)
    began = time.time()
    found = measure(settings, info)
    if not info.is_main:
        return
    whole = {**record, **found, "at": time.time(), "seconds": time.time() - began}
    use = _utilisation(samples, before)
    _write({**whole, **({"utilisation": use} if use else {})}, directory)


def _blank(
    settings: Settings,
    variation: tuple[tuple[str, int], ...],
    repeat: int,
    info: DistributedInfo,
    load: float,
) -> Record:
    """A record without its numbers."""
    import torch

    cuda = info.device.startswith("cuda")
    return {
        "kind": KIND,
        "format": FORMAT,
        "world_size": info.world_size,
        "nodes": -(-info.world_size // max(1, info.local_world_size)),
        "repeat": repeat,
        "variation": dict(variation),
        "settings": asdict(settings),
        "machine": {
            "host": host_name(),
            "device": torch.cuda.get_device_name(info.device) if cuda else "cpu",
            "cpus": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "load": load,
            "backend": info.backend or "none",
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _agreed(info: DistributedInfo, word: bool) -> bool:
    """Whether any rank says so: all must take the same way, and views of a directory differ."""
    if info.world_size == 1:
        return word
    import torch

    from hpc_toolkit.distributed.collectives import all_reduce

    return bool(all_reduce(torch.tensor(float(word), device=info.device)).item())


def _done(directory: Path | None, size: int) -> set[tuple[str, int, int]]:
    """What earlier launches measured at this world size."""
    if directory is None:
        return set()
    return {identity(one) for one in read_records(directory) if one["world_size"] == size}


def _write(record: Record, directory: Path | None) -> None:
    import json

    from hpc_toolkit.provenance import collect_provenance

    made = collect_provenance(())
    record["commit"], record["hpctk"] = made["git_commit"], made["hpctk"]
    record["command"] = shlex.join(
        [sys.executable, "-m", "hpc_toolkit.scaling.program", *sys.argv[1:]]
    )
    line = json.dumps(record, allow_nan=False).encode() + b"\n"
    if directory is None:
        sys.stdout.write(line.decode())
        sys.stdout.flush()
        return
    path = directory / DIRECTORY / f"world-{record['world_size']}.jsonl"
    fd = files.open_or_create(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        # A line that a killed rank left without its end would swallow this one.
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        files.write_all(fd, b"\n" * torn + line)
    finally:
        os.close(fd)


@contextmanager
def monitored(directory: Path | None, size: int) -> Iterator[Path | None]:
    """Have one rank of each node sample it; yields its file, None where nothing samples."""
    if directory is None or os.environ.get("LOCAL_RANK", "0") != "0":
        yield None
        return
    from hpc_toolkit.monitor.child import watching

    path = directory / "monitor" / f"world-{size}-{host_name()}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        watcher = watching(path, MONITOR_INTERVAL_S)
        watcher.__enter__()
    except ConfigError as error:
        sys.stderr.write(f"note: nothing samples this node: {error.message} ({error.hint})\n")
        yield None
        return
    try:
        yield path
    finally:
        watcher.__exit__(None, None, None)


def _sample_count(path: Path | None) -> int:
    return len(_last_samples(path))


def _last_samples(path: Path | None) -> list[dict[str, Any]]:
    from hpc_toolkit.monitor.recordings import read_recordings

    found = read_recordings(path) if path is not None else []
    return found[-1].samples if found else []


def _utilisation(path: Path | None, before: int) -> dict[str, Any]:
    """What the node of rank 0 did meanwhile; empty where it was too short for a sample."""
    from hpc_toolkit.monitor.recordings import Recording, read_recordings, summarise

    recordings = read_recordings(path) if path is not None else []
    if not recordings or len(recordings[-1].samples) <= before:
        return {}
    summary = summarise(Recording(recordings[-1].header, recordings[-1].samples[before:]))
    return {key: summary[key] for key in ("samples", "cpu_percent_mean", "gpus")}


if __name__ == "__main__":
    from hpc_toolkit.distributed.group import leave

    # Where the launcher asks a rank to leave, the monitor's child still ends with it.
    with suppress(BrokenPipeError):
        leave(main())
