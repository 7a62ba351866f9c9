"""Output of ranks: a file for each rank, stream and restart, and lines on the terminal."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


_OF_RANK = re.compile(r"\[rank \d+\] ")


class WholeLines(io.TextIOBase):
    """Passes on text; holds back the text of a rank until its line is complete."""

    def __init__(self, under: TextIO) -> None:
        self._under = under
        self._lock = threading.Lock()
        self._begun: dict[str, str] = {}

    def write(self, text: str) -> int:
        """Write ``text``, which torch's threads pass as a line or as a part of one."""
        with self._lock:
            found = _OF_RANK.match(text)
            if found is None:
                self._under.write(text)
            else:
                prefix = found[0]
                line = self._begun.pop(prefix, "") + text[found.end() :]
                if line.endswith("\n"):
                    self._under.write(prefix + line)
                    self._under.flush()
                else:
                    self._begun[prefix] = line
        return len(text)

    def fileno(self) -> int:
        """Return the underlying descriptor, which a forked rank redirects (--start-method fork)."""
        return self._under.fileno()

    def flush(self) -> None:
        """Flush the underlying stream; incomplete lines of ranks stay held back."""
        self._under.flush()

    def end(self) -> None:
        """Write the incomplete last lines of ranks."""
        with self._lock:
            for prefix, line in self._begun.items():
                self._under.write(f"{prefix}{line}\n")
            self._begun.clear()
            self._under.flush()


@contextlib.contextmanager
def whole_lines() -> Iterator[None]:
    """Make torch's output on stdout and stderr appear in complete lines."""
    out, err = WholeLines(sys.stdout), WholeLines(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.end()
            err.end()
