"""Output files of ranks: one for each rank, stream and restart."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std

PREFIX = "[rank ${rank}] "
"""Prefix of each line of a rank on the terminal, as torch's template."""


def log_path(directory: Path, rank: int, restart: int, stream: str) -> Path:
    """Return a rank's file; ``stream`` is out, err, or error.json for a recorded exception."""
    return directory / f"rank-{rank}.restart-{restart}.{stream}"


def make_next(directory: Path) -> Path:
    """Make a directory of this name, or with the next free number appended: NAME, NAME-2 ..."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, FileExistsError) as error:
        # For example below /proc, where only the kernel creates names, or below a file.
        message = f"{error.filename}: no directory can be made there"
        raise ConfigError(message, hint="name another one: --run-dir, or --log-dir") from error
    path, number = directory, 1
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            path = directory.with_name(f"{directory.name}-{number}")
        else:
            return path


def drop_if_torn(path: str) -> None:
    """Remove a recorded exception that is not valid JSON: a full disk cuts it, and torch fails."""
    try:
        with open(path, encoding="utf-8") as file:
            json.load(file)
    except ValueError:
        Path(path).unlink()
    except OSError:
        pass


@functools.cache
def rank_logs_class() -> type[LogsSpecs]:
    """Return the class that tells torch's agent where output goes.

    Torch's own class creates directories by local rank and attempt, and leaves them in /tmp.
    """
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import to_map

    class RankLogs(LogsSpecs):
        """Files in one directory, named by rank and restart."""

        @property
        def root_log_dir(self) -> str:
            return str(self._root_log_dir)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            directory = Path(self.root_log_dir)
            directory.mkdir(parents=True, exist_ok=True)
            tees = to_map(self._tee, len(envs))
            sent = to_map(self._redirects, len(envs))
            first = f"filtered.rank-{envs[0]['RANK']}"
            found = LogsDest(
                filtered_stdout=str(directory / f"{first}.out"),
                filtered_stderr=str(directory / f"{first}.err"),
            )
            for local, env in envs.items():
                paths = {
                    stream: str(
                        log_path(
                            directory,
                            int(env["RANK"]),
                            int(env["TORCHELASTIC_RESTART_COUNT"]),
                            stream,
                        )
                    )
                    for stream in ("out", "err", "error.json")
                }
                shown = not self._local_ranks_filter or local in self._local_ranks_filter
                for stream, flag, to_file, to_both in (
                    ("out", Std.OUT, found.stdouts, found.tee_stdouts),
                    ("err", Std.ERR, found.stderrs, found.tee_stderrs),
                ):
                    kept = bool((sent[local] | tees[local]) & flag)
                    to_file[local] = paths[stream] if kept else "" if shown else os.devnull
                    if shown and tees[local] & flag:
                        to_both[local] = paths[stream]
                found.error_files[local] = paths["error.json"]
                env["TORCHELASTIC_ERROR_FILE"] = paths["error.json"]
            return found

    return RankLogs


def make_rank_logs(
    directory: Path,
    *,
    redirects: Std | dict[int, Std],
    tee: Std | dict[int, Std],
    local_ranks: set[int] | None,
) -> LogsSpecs:
    """Return the object that makes torch's agent write output files to ``directory``."""
    made = rank_logs_class()
    return made(str(directory), redirects, tee, local_ranks)
