"""Every call that changes a file of a run is cut once, in every way, and nothing comes of it.

``make test`` tries some points of each sweep; ``make soak`` tries all.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.journal import JournalReader, UnitRun, read_lines
from hpc_toolkit.rundir.layout import RunPaths, WorkloadSpec
from tests.faults import loud, tally
from tests.faults.campaignrun import asked, make_campaign, play, table_of
from tests.faults.cut import WAYS, Commands, Cut, Struck, copy_of
from tests.toyrun import NOOP, ToyRun, tree

ITEMS = 4
EVERY = 23
"""A reduced sweep tries every so manieth of all (change, way); no divisor of the number of ways."""


def at_every(number: int, *, limit_s: int = 900) -> pytest.MarkDecorator:
    """A sweep of every so manieth point in 'make test', and of each in 'make soak'."""
    each = pytest.param(1, id="each", marks=[pytest.mark.soak, pytest.mark.timeout(limit_s)])
    return pytest.mark.parametrize("every", [pytest.param(number, id="some"), each])


class Place:
    """A run as it was before the command, and a copy on which the command is called."""

    def __init__(
        self,
        home: Path,
        make: Callable[[Path], None],
        *words: object,
        begin: Callable[[Cut], None] = lambda _cut: None,
    ) -> None:
        self.home = home
        self.template = home / "template"
        self.run = home / "run"
        self.words = words
        make(self.template)
        self.call = Commands(home, begin)

    def without_a_cut(self) -> Struck:
        """The command as it should be."""
        copy_of(self.template, self.run)
        return self.call(*self.words, root=self.run)

    def again(self, where: str, *words: object, code: int = 0) -> Struck:
        """These words or the command once more, without a cut."""
        ended = self.call(*(words or self.words), root=self.run)
        assert ended.code == code, f"{where}\nthen: {ended}"
        return ended

    def sweep(self, every: int) -> Iterator[tuple[Struck, str, str]]:
        """The command, cut at one point after the other: how it ended, the way, and where."""
        for struck, way, where in self.points(every):
            check_end(struck, way, where)
            yield struck, way, where

    def points(
        self, every: int, *, ways: tuple[str, ...] = WAYS, name: str = ""
    ) -> Iterator[tuple[Struck, str, str]]:
        """Like :meth:`sweep`, whatever the end of the command."""
        whole = self.without_a_cut()
        assert (whole.code, whole.fired) == (0, ""), whole
        assert whole.count > 1
        changes = whole.count
        points = [(at, way) for at in range(1, changes + 1) for way in ways]
        fired = 0
        for at, way in points[::every]:
            copy_of(self.template, self.run)
            struck = self.call(*self.words, root=self.run, at=at, way=way)
            where = f"{self.words[0]}, {way} at change {at}, {struck.fired}: {struck.err}"
            if not struck.fired:  # no write is left that could be short
                assert struck.code == 0, where
                continue
            fired += 1
            yield struck, way, where
        tally.count(name or str(self.words[0]), changes=changes, cuts=fired)


def check_end(struck: Struck, way: str, where: str) -> None:
    """The exit code, and that it is told what is wrong and what to do, without a traceback."""
    if "kill" in way:
        assert struck.code == -9, where
        return
    assert "Traceback" not in struck.err, where
    assert struck.code in (0, 75), where
    if struck.code == 75:
        assert "error: " in struck.err, where
        assert "hint: " in struck.err, where


def make_new(root: Path) -> None:
    ToyRun(root, ITEMS, unit=2)


def make_holding(root: Path) -> None:
    ToyRun(root, ITEMS, unit=2, workload=WorkloadSpec(function="tests.faults.loud:hold"))


def make_finished(root: Path) -> None:
    toy = ToyRun(root, ITEMS, unit=4, max_attempts=1)
    toy.worker("w").work(toy.unit_name(0), i0="done", i1="failed", i2="done", i3="permanent")


def make_open(root: Path) -> None:
    toy = ToyRun(root, 2, unit=2, sealed=False)
    toy.worker("w").work(toy.unit_name(0), i0="done", i1="done")


def done_lines(run: Path) -> dict[int, dict[str, Any]]:
    """The results on disk that count (R11), by item; the file's worker is ``worker``."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted((run / "journals").glob("*.jsonl"), key=lambda path: path.stem):
        for line in _lines(path):
            assert line["unit"].startswith("items/000001-")
            item = line.get("item", 0)
            # A worker that goes on under another name repeats lines of which it is not sure.
            older = item not in found or line["generation"] < found[item]["generation"]
            if line["type"] == "done" and older:
                found[item] = {**line, "worker": path.stem}
    return found


def check_parts(run: Path, found: Iterable[dict[str, Any]], where: str) -> None:
    """Whether the bytes that lines or rows name are there."""
    for one in found:
        for place, tag in one.get("types", {}).items():
            if isinstance(tag, list):
                _, start, length, total = tag
                data = RunPaths(run).values(one["worker"]).read_bytes()[start : start + length]
                assert (len(data), f"{crc32(data):08x}") == (length, total), f"{place}, {where}"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for found in JournalReader(path).poll():
        if isinstance(found, UnitRun):
            yield from (line.record for line in read_lines(path, found.start, found.end))
        else:
            yield found.record


def check_rows(rows: list[dict[str, Any]], count: int, where: object) -> list[dict[str, Any]]:
    """Each item has one row, is done, and no attempt was burnt."""
    assert [row["item"]["id"] for row in rows] == list(range(count)), where
    assert {(row["state"], row["attempts"]) for row in rows} == {("done", 1)}, where
    return rows


def check_work(place: Place, every: int) -> None:
    for struck, way, where in place.sweep(every):
        journals = {path: path.read_bytes() for path in (place.run / "journals").iterdir()}
        if way == "kill and power loss":
            sizes = {".jsonl": struck.synced, ".values": struck.kept}
            journals = {path: data[: sizes[path.suffix]] for path, data in journals.items()}
            for path, data in journals.items():
                path.write_bytes(data)
        before = done_lines(place.run)
        check_parts(place.run, before.values(), where)
        Run.open(place.run).status()
        if struck.code == 0:
            assert len(before) == ITEMS, where

        # Who died within the write of its heartbeat cannot be read, and is timed by the lease.
        again = place.again(where, "work", "run", "--lease", "1s")

        assert again.err == "", where
        rows = check_rows(Run.open(place.run).table().rows, ITEMS, where)
        check_parts(place.run, rows, where)
        for path, data in journals.items():
            assert path.read_bytes()[: len(data)] == data, where
        # The first generation wins, so what was committed is what everybody gets.
        for item, line in before.items():
            assert (rows[item]["worker"], rows[item]["value"]) == (line["worker"], line["value"])


def check_gather(place: Place, every: int) -> None:
    assert place.without_a_cut().code == 0
    wanted = Run.open(place.run).results()
    for _, _, where in place.sweep(every):
        file = place.run / "rows.jsonl"
        if file.exists():
            assert len(file.read_text().splitlines()) == ITEMS, where

        place.again(where)

        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert rows == wanted, where
        table = Run.open(place.run).table()
        assert (table.published, table.rows) == (True, wanted), where


def check_add(place: Place, every: int) -> None:
    for struck, _, where in place.sweep(every):
        total = Run.open(place.run).status().stages["items"].total
        assert total in ((4,) if struck.code == 0 else (2, 4)), where

        place.again(where, code=0 if total == 2 else 1)

        run = Run.open(place.run)
        assert run.status().stages["items"].total == 4, where
        run.seal()
        place.again(where, "work", "run")
        assert [row["item"]["id"] for row in Run.open(place.run).results()] == [0, 1, 10, 11]


def check_seal(place: Place, every: int) -> None:
    for struck, _, where in place.sweep(every):
        sealed = Run.open(place.run).status().stages["items"].sealed
        assert sealed or struck.code != 0, where

        place.again(where)

        assert Run.open(place.run).status().complete, where


def check_retry(place: Place, every: int) -> None:
    for struck, _, where in place.sweep(every):
        failed = Run.open(place.run).status().stages["items"].failed
        assert failed in ((0,) if struck.code == 0 else (0, 2)), where

        place.again(where)

        counts = Run.open(place.run).status().stages["items"]
        assert (counts.done, counts.failed, counts.pending) == (2, 0, 2), where


def make_box(root: Path) -> None:
    root.mkdir()
    (root / "items.jsonl").write_text("".join(f'{{"id": {n}}}\n' for n in range(ITEMS)))


def check_init(place: Place, every: int) -> None:
    made = place.run / "new"
    for struck, way, where in place.sweep(every):
        assert made.exists() or struck.code != 0, where
        left = [path.name for path in place.run.iterdir() if path.name.endswith(".tmp")]
        assert not left or "kill" in way, where
        exists = made.exists()
        if exists:
            counts = Run.open(made).status().stages["items"]
            assert (counts.pending, counts.sealed) == (ITEMS, True), where

        place.again(where, code=1 if exists else 0)

        place.again(where, "work", "run/new")
        rows = Run.open(made).results()
        assert [row["item"]["id"] for row in rows] == list(range(ITEMS)), where


def make_worked_on(root: Path) -> None:
    toy = ToyRun(root, ITEMS, unit=2)
    toy.worker("w", at=time.time())


def check_drain(place: Place, every: int) -> None:
    for struck, _, where in place.sweep(every):
        asked, notices = ControlReader(RunPaths(place.run)).poll()
        assert asked or struck.code != 0, where
        assert {tuple(one.workers) for one in asked} <= {("w",)}, where
        assert not notices, where

        place.again(where)

        asked, _ = ControlReader(RunPaths(place.run)).poll()
        assert {tuple(one.workers) for one in asked} == {("w",)}, where


INIT = ["run/new", "--workload", NOOP.function, "--items", "run/items.jsonl"]
CHECKS: dict[str, tuple[Callable[[Path], None], Callable[[Place, int], None], list[Any]]] = {
    "work": (make_new, check_work, []),
    "gather": (make_finished, check_gather, ["-o", "run/rows.jsonl"]),
    "add": (make_open, check_add, ["--items", "more.jsonl"]),
    "seal": (make_open, check_seal, []),
    "retry": (make_finished, check_retry, []),
    "init": (make_box, check_init, INIT),
    "drain": (make_worked_on, check_drain, []),
}


def place_of(command: str, home: Path) -> Place:
    (home / "more.jsonl").write_text('{"id": 10}\n{"id": 11}\n')
    make, _, words = CHECKS[command]
    return Place(home, make, command, *(words if command == "init" else ["run", *words]))


@at_every(EVERY)
@pytest.mark.parametrize("command", CHECKS)
def test_a_command_that_is_cut_loses_nothing_and_can_be_repeated(
    fast_dir: Path, command: str, every: int
) -> None:
    # What init makes must be worked on to show that it is whole, which takes longest.
    some = 3 if command == "init" and every > 1 else 1
    CHECKS[command][1](place_of(command, fast_dir), some * every)


@at_every(EVERY)
def test_a_line_of_a_worker_that_is_cut_names_no_byte_that_is_not_there(
    fast_dir: Path, every: int
) -> None:
    place = Place(fast_dir, make_holding, "work", "run")
    check_work(place, every)
    rows = Run.open(place.run).results()
    assert [row["value"] for row in rows] == [loud.hold({"id": n}) for n in range(ITEMS)]


def place_of_coordinator(home: Path) -> Place:
    begin = partial(play, root=home / "run")
    return Place(home, make_campaign, "campaign", "coordinate", "run", begin=begin)


@at_every(10 * EVERY, limit_s=3600)
def test_r14_a_coordinator_that_is_cut_goes_on_with_the_same_sequence(
    fast_dir: Path, every: int
) -> None:
    place = place_of_coordinator(fast_dir)
    whole = place.without_a_cut()
    assert (whole.code, whole.err, whole.fired) == (0, "", "")
    sequence, rows = asked(place.run), table_of(place.run)
    assert len(set(sequence)) == 5
    for struck, _, where in place.sweep(every):
        so_far = asked(place.run)
        assert so_far == sequence[: len(so_far)], where
        assert struck.code != 0 or so_far == sequence, where

        again = place.again(where)

        assert again.err == "", where
        assert (asked(place.run), table_of(place.run)) == (sequence, rows), where
        assert Run.open(place.run).status().complete, where


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("status", "--json"),
        ("explain", "--item", "0"),
        ("logs",),
        ("gather", "-o", "rows.csv"),
    ],
    ids=" ".join,
)
def test_a_command_that_reads_changes_nothing(fast_dir: Path, words: tuple[str, ...]) -> None:
    place = Place(fast_dir, make_finished, words[0], "run", *words[1:])
    Run.open(place.template).results()
    before = tree(place.template)

    ended = place.without_a_cut()

    assert (ended.code, ended.count) == (0, 0), ended
    assert {name: one[2] for name, one in tree(place.run).items()} == {
        name: one[2] for name, one in before.items()
    }


def test_rows_that_a_full_disk_does_not_take_are_worth_another_try(fast_dir: Path) -> None:
    place = place_of("gather", fast_dir)
    changes = place.without_a_cut().count
    copy_of(place.template, place.run)

    # The last changes are those of the file: written, synced, renamed, and its directory synced.
    ended = place.call(*place.words, root=place.run, at=changes - 4, way="ENOSPC")

    assert ended.code == 75
    assert ended.err.startswith(
        "error: cannot write run/rows.jsonl: No space left on device\nhint:"
    )
    assert Run.open(place.run).status().published


CALLS = "openat,write,pwrite64,fsync,fdatasync,symlink,symlinkat,rename,renameat,mkdir,mkdirat,"
CALLS += "unlink,unlinkat,rmdir,truncate,ftruncate,link,linkat,clone,clone3,fork,vfork"
COUNTED = """
import sys
from pathlib import Path
from tests.faults.test_faults import place_of
print(place_of("work", Path(sys.argv[1])).without_a_cut().count)
"""


def test_the_kernel_sees_no_change_that_is_not_counted(fast_dir: Path) -> None:
    """The calls are counted in Python; strace counts those of the same run again."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    said = fast_dir / "calls"
    argv = [strace, "-ff", "-y", "-s0", "-e", f"trace={CALLS}", "-o", str(said), sys.executable]

    counted = subprocess.run(
        [*argv, "-c", COUNTED, str(fast_dir)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
    )

    lines = _calls_of_the_command(said)
    inside = [line for line in lines if re.search(r"\brun/", line)]
    changing = [
        line for line in inside if "openat" not in line or re.search("O_(WR|RDWR|CR)", line)
    ]
    assert len(changing) == int(counted.stdout), changing


def _calls_of_the_command(said: Path) -> list[str]:
    """Those of all threads of the first process that the traced one forked."""
    calls = {
        int(path.suffix[1:]): path.read_text().splitlines() for path in said.parent.glob("calls.*")
    }
    born = {
        int(line.rpartition(" = ")[2]): (thread, "CLONE_THREAD" in line)
        for thread, lines in calls.items()
        for line in lines
        if re.match("(clone|clone3|fork|vfork)\\(", line) and re.search(r" = [0-9]+$", line)
    }
    (first,) = calls.keys() - born.keys()
    command = min(
        child for child, (parent, thread) in born.items() if parent == first and not thread
    )
    threads = {command}
    for child, (parent, thread) in sorted(born.items()):
        if thread and parent in threads:
            threads.add(child)
    return [line for one in threads for line in calls.get(one, ())]
