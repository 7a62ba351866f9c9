"""The log of a stage: numbered entries in one order that all processes see (rules R1, R2)."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from hpc_toolkit.errors import RunError, TryAgainLaterError
from hpc_toolkit.queue.presence import DIRECT, HEAD, Probes, ProbeTimeoutError
from hpc_toolkit.queue.units import Segment
from hpc_toolkit.rundir import files, trust
from hpc_toolkit.rundir.layout import StagePaths

SEALED = "sealed"

_TRIES, _PAUSE_S = 50, 0.02
_ENTRY = b".\n"
"""Bytes in ``head`` for each entry; a lone dot at the end says that no item is pending."""
_LIST_EVERY = 60
"""One in this many hinted looks lists the log: one a minute, or fewer if many workers wait."""
_HEAD_S = 5.0
"""Seconds for a write of ``head`` in a program that may wait.

``head`` is a hint, not worth the 90 s that an NFSv4 server can need to recall its delegation from
a lost host.
"""


class StageLog:
    """The part of a stage's log that one process has read."""

    def __init__(self, paths: StagePaths, probes: Probes = DIRECT) -> None:
        self.paths = paths
        self._probes = probes
        self._patient = Probes(_HEAD_S)
        self.length = 0
        """Entries read so far."""
        self.segments: dict[int, Segment] = {}
        """Segments by entry number."""
        self.sealed = False
        """Whether no segment can follow."""
        self.floors: dict[tuple[int, int], int] = {}
        """Highest generation whose failures a retry lifted, by (entry, position) of the item."""
        self.table: tuple[int, str] | None = None
        """Entry number and payload name of the latest results table."""
        self.retried_at: dict[tuple[int, int], int] = {}
        """Entry number of the last retry that names an item."""
        self.last_retry = 0
        """Entry number of the last retry; 0 without one."""
        self.hidden = ""
        """The payload that the next entry names, if it is missing or incomplete so far."""
        self._complete_at = 0
        self._old_word: int | None = None
        self._looks = 0
        self._head: int | None = None

    def poll(self, *, hinted: bool = False) -> bool:
        """Read the entries that were added; return whether there were any.

        Reading stops before an entry whose payload is not completely visible yet. Such an entry is
        tried again by the next call, never skipped.

        If ``hinted``, believe ``head`` if it shows no new entry, so the call costs one ``open``.
        One look in 60 lists the log anyway, because a process can die between adding an entry and
        writing ``head``. That look then writes ``head`` for the other readers.
        """
        before = self.length
        self._looks += hinted
        listed = hinted and self._looks % _LIST_EVERY == 0
        if hinted and self.hint() <= before and not listed:
            return False
        while (target := self._next_target(listed=listed)) is not None:
            try:
                self._read(target)
            except (FileNotFoundError, ValueError):
                self.hidden = target
                break
            except NotADirectoryError as error:
                raise files.misplaced(error) from error
            self.length += 1
            self.hidden = ""
        if listed and self.hint() < self.length:
            with suppress(OSError):
                self.show(self.length)
        return self.length > before

    def _next_target(self, *, listed: bool) -> str | None:
        path = self.paths.entry(self.length + 1)
        try:
            return path.readlink().as_posix()
        except FileNotFoundError:
            pass
        except NotADirectoryError as error:
            raise files.misplaced(error) from error
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            message = f"{path} is not a link: the run was copied without its symbolic links"
            raise RunError(message, hint="copy it again with 'cp -a', 'rsync -a' or tar") from error
        if not listed and self.hint() <= self.length:
            return None
        # The name may be cached as missing; listing its directory asks the server again.
        if path.name not in files.list_names(self.paths.log):
            return None
        return files.read_name(path)

    def hint(self) -> int:
        """Number of entries that ``head`` shows; may be too low, and is 0 if it is damaged."""
        data = files.read_fresh(self.paths.head)
        if data.strip(_ENTRY + b"\0"):
            data = b""
        number, complete = divmod(len(data), len(_ENTRY))
        if complete:
            self._complete_at = number
        if self._old_word is None:
            self._old_word = self._complete_at
        return number

    @cached_property
    def _local(self) -> bool:
        return trust.is_local(self.paths.log)

    def hold_head(self) -> None:
        """Keep ``head`` open for writing while this process lives; for adding many entries.

        While a file is open for writing, an NFSv4 server delegates it to no client. So a later
        write never waits for the lease of a lost client to end.
        """
        if self._head is None:
            self._head = files.open_or_create(self.paths.head, os.O_WRONLY)

    def show(self, number: int) -> None:
        """Write into ``head`` that the log has ``number`` entries; it never shows fewer again.

        Raises ProbeTimeoutError: the file server has not answered yet. As after any lost write of
        ``head``, other processes list the log within a minute.
        """
        self._write_head(_ENTRY, (number - 1) * len(_ENTRY))

    def _write_head(self, data: bytes, at: int) -> None:
        if self._local:
            files.write_at(self.paths.head, data, at)
            return
        probes = self._patient if self._probes.limit_s is None else self._probes
        probes.look(HEAD, str(at), lambda: files.write_at(self.paths.head, data, at))

    @property
    def reported_complete(self) -> bool:
        """Whether a worker reported, since this process began to read, that no item is pending.

        An earlier report proves nothing: a power loss may have taken the lines behind it.
        """
        return self.sealed and self._complete_at == self.length != self._old_word

    def report_complete(self) -> None:
        """Tell waiting workers that no item is pending; it stays true of this log (rule R9)."""
        if self.hint() == self.length and not self.reported_complete:
            self._write_head(_ENTRY[:1], self.length * len(_ENTRY))

    @property
    def waits_for(self) -> str:
        """Describe the entry whose payload is not visible yet; "" if there is none."""
        if not self.hidden:
            return ""
        number = f"entry {self.length + 1} of the log of stage {self.paths.name!r}"
        return f"{number} names {self.hidden}, which is missing or incomplete"

    def refuse_hidden(self) -> None:
        """Raise TryAgainLaterError if an entry is hidden, for callers that need every entry."""
        if self.hidden:
            hint = "try again in a minute; 'hpctk doctor' shows whether it is lost"
            raise TryAgainLaterError(self.waits_for, hint=hint)

    def _read(self, target: str) -> None:
        """Read the next entry.

        Raises FileNotFoundError, ValueError: its payload is missing or incomplete; RunError: its
        payload is complete but not valid, or its kind is unknown.
        """
        number = self.length + 1
        kind = target.partition("/")[0]
        if kind == SEALED:
            self.sealed = True
        elif kind == "items":
            with _checked(self.paths, target):
                self.segments[number] = Segment(self.paths.root / target, number)
        elif kind == "retries":
            with _checked(self.paths, target):
                record = json.loads((self.paths.root / target).read_bytes())
            with _checked(self.paths, target, ValueError):
                for entry, position, floor in record["floors"]:
                    key = (entry, position)
                    self.floors[key] = max(floor, self.floors.get(key, 0))
                    self.retried_at[key] = number
            self.last_retry = number
        elif kind == "results":
            with (self.paths.root / target).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                if file.read() != b"\n":
                    raise ValueError("it ends within a line")
            self.table = (number, target)
        else:
            message = f"{self.paths.entry(number)}: unknown entry {target!r}"
            raise RunError(message, hint="upgrade hpctk to the version that wrote it")

    @property
    def is_published(self) -> bool:
        """Whether the latest table is the answer: no retry and no items follow it."""
        after = max(self.last_retry, *self.segments, 0)
        return self.table is not None and after < self.table[0]

    def table_header(self) -> tuple[int, dict[int, set[int]]]:
        """Number of rows of the latest table, and the failed positions of each segment."""
        assert self.table is not None
        target = self.table[1]
        with _checked(self.paths, target, ValueError):
            with (self.paths.root / target).open("rb") as file:
                header = json.loads(file.readline())
            failed: dict[int, set[int]] = {entry: set() for entry in header["segments"]}
            for entry, item in header["failed"]:
                failed[entry].add(item)
            return int(header["rows"]), failed

    def append(self, target: str) -> bool:
        """Try to add one entry after those that were read; False if another process was faster.

        After False, poll and prepare the entry again: the log that it was based on has changed.
        """
        number = self.length + 1
        # Payload names are unique, so a target that is ours was created by us even if the reply
        # was lost.
        won = files.create_name(self.paths.entry(number), target) == target
        with suppress(ProbeTimeoutError):
            self.show(number)
        if not self._local:
            files.show_names(self.paths.log)
        files.sync_directory(self.paths.log)
        return won

    def seal(self) -> None:
        """Add the seal, after which no segment can follow; no-op if the log is sealed."""
        while not self.sealed:
            self.append(SEALED)
            self._follow()

    def write_payload(self, kind: str, suffix: str, chunks: Iterable[bytes]) -> str:
        """Write and sync a payload; return its target for :meth:`append`."""
        target = f"{kind}/{os.urandom(8).hex()}{suffix}"
        files.write_new(self.paths.root / target, chunks)
        return target

    def add_segment(
        self,
        lines: Iterable[bytes],
        *,
        revived: bool = False,
        again: Callable[[], bool] | None = None,
    ) -> bool:
        """Write a segment and try to add it; False if another process was faster.

        ``revived``: it may follow the seal, as a retry gave an earlier stage results (rule R17).
        ``again``: whether to try once more to add it, behind the entries that were faster.
        """
        if self.sealed and not revived:
            message = f"stage {self.paths.name!r} of {self.paths.root.parent.parent} is sealed"
            raise RunError(message, hint="create the run with --open to add items later")
        return bool(self._publish("items", ".jsonl", lines, again))

    def add_retry(self, floors: list[tuple[int, int, int]]) -> bool:
        """Try to lift failures up to a generation: (entry, position, floor) of each item."""
        record = json.dumps({"format": 1, "floors": floors}).encode()
        return bool(self._publish("retries", ".json", [record]))

    def add_table(self, chunks: Iterable[bytes]) -> str:
        """Try to publish a table; return the name of its payload, or "" as :meth:`append`."""
        return self._publish("results", ".jsonl", chunks)

    def _publish(
        self,
        kind: str,
        suffix: str,
        chunks: Iterable[bytes],
        again: Callable[[], bool] | None = None,
    ) -> str:
        target = self.write_payload(kind, suffix, chunks)
        while not self.append(target):
            if again is not None:
                self._follow()
                if again():
                    continue
            (self.paths.root / target).unlink(missing_ok=True)  # our own, and no entry names it
            self._follow()
            return ""
        self.poll()
        return target

    def _follow(self) -> None:
        """Read the entry that won the number tried; it may become visible late."""
        import time

        for _ in range(_TRIES):
            self.poll()
            if not self.hidden:
                return
            time.sleep(_PAUSE_S)
        self.refuse_hidden()


def damaged(path: Path, what: str) -> RunError:
    run = next((one for one in path.parents if (one / "run.json").exists()), path.parent)
    hint = f"restore it from a backup; 'hpctk doctor {run}' shows what else is damaged"
    return RunError(f"{path} is damaged: {what}", hint=hint)


@contextmanager
def _checked(paths: StagePaths, target: str, more: type[Exception] = TypeError) -> Iterator[None]:
    """Turn these errors, and ``more``, from an invalid payload into a RunError that names it."""
    try:
        yield
    except (AttributeError, LookupError, RecursionError, TypeError, more) as error:
        raise damaged(paths.root / target, f"{type(error).__name__}: {error}") from error
