"""Breaks the code in one place at a time and shows which test of an invariant fails.

    python tests/mutants.py [I5 ...]

Each mutant is made in a copy of the package, and the tests named after its invariant run there.
Exit code 0: every mutant was caught; 1: one survived, could not be made, or broke the tests.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
LIMIT_S = 300.0


@dataclass(frozen=True)
class Mutant:
    """One change of the code, and the tests that must then fail."""

    invariant: str
    what: str
    """The mistake that the change makes."""
    file: str
    """Path below ``hpc_toolkit``."""
    old: str
    new: str
    others: tuple[str, ...] = ()
    """Paths below ``tests/unit`` where the module's own tests are not meant."""

    @property
    def tests(self) -> tuple[str, ...]:
        """Paths below ``tests/unit``: ``others``, or the module that is called as ``file``."""
        room, name = self.file.removesuffix(".py").split("/")
        named = (f"test_{room}_{name}.py", f"test_{name}.py")
        own = [one for one in named if (ROOT / "tests/unit" / one).is_file()]
        return self.others or tuple(own[:1])


MUTANTS = (
    Mutant(
        "I1",
        "results are not synced",
        "rundir/journal.py",
        "            os.fdatasync(self._fd)\n",
        "            os.fstat(self._fd)\n",
        ("test_journal.py", "test_unitruns.py"),
    ),
    Mutant(
        "I1",
        "a pass returns before its lines are synced",
        "worker/unitruns.py",
        "        self._sync()\n        self.loaded",
        "        self.loaded",
    ),
    Mutant(
        "I1",
        "a line names bytes of a value file that are not synced",
        "worker/unitlines.py",
        "                    values.sync()\n",
        "                    pass\n",
        ("test_unitruns.py",),
    ),
    Mutant(
        "I1",
        "the name of a value file is not synced",
        "rundir/journal.py",
        "            sync_directory(self.path.parent)\n",
        "",
        ("test_unitruns.py",),
    ),
    Mutant(
        "I1",
        "a sync that failed counts as done",
        "rundir/journal.py",
        "            os.fdatasync(self._fd)\n            self.synced = self.size",
        "            self.synced = self.size\n            os.fdatasync(self._fd)",
    ),
    Mutant(
        "I1",
        "a payload is named before it is synced",
        "rundir/files.py",
        "            _write_chunks(fd, chunks)\n            os.fsync(fd)\n",
        "            _write_chunks(fd, chunks)\n",
    ),
    Mutant(
        "I1",
        "results that a journal did not take are thrown away",
        "worker/hiccups.py",
        "            self._unwritten += member.journal.unsynced\n",
        "",
    ),
    Mutant(
        "I1",
        "what the executor still answers is lost when the name changes",
        "worker/unitruns.py",
        "        stream.lines.move(self.journal)\n",
        "        return\n",
    ),
    Mutant(
        "I3",
        "another name claims before the former one has finished",
        "worker/hiccups.py",
        "        while self._members[1:]:\n",
        "        while self._members[9:]:\n",
    ),
    Mutant(
        "I4",
        "a worker works without a lock that it could hold later",
        "queue/leases.py",
        "            if error.errno in TRANSIENT:\n",
        "            if error.errno is None:\n",
        ("test_hiccups.py",),
    ),
    Mutant(
        "I2",
        "the highest generation wins",
        "queue/state.py",
        "min(history.done, ref)",
        "max(history.done, ref)",
        ("test_queue_state.py", "test_gather.py"),
    ),
    Mutant(
        "I2",
        "the line that is read last wins",
        "queue/state.py",
        "history.done = ref if history.done is None else min(history.done, ref)",
        "history.done = ref",
    ),
    Mutant(
        "I2",
        "every gather computes anew",
        "results/gather.py",
        "        if stage.log.is_published:",
        "        if stage.log.is_published and stage.log.length < 0:",
    ),
    Mutant(
        "I2",
        "a table after a retry changes rows that stood",
        "results/gather.py",
        "    return kept.has(entry, position) and not (lifted and position in kept.failed[entry])",
        "    return False",
    ),
    Mutant(
        "I2",
        "a gather that lost the race answers with what it had",
        "results/gather.py",
        "            if name := stage.log.add_table(made.write(rows, _failed(stage))):",
        "            if (name := stage.log.add_table(made.write(rows, _failed(stage)))) or True:",
    ),
    Mutant(
        "I3",
        "the unit of a dead owner is never free",
        "queue/assignment.py",
        "        if verdict is not None and verdict.alive:",
        "        if verdict is not None and not verdict.finished:",
    ),
    Mutant(
        "I3",
        "attempts are generations",
        "queue/state.py",
        "        return sum(generation > floor for generation in self.failures)",
        "        return max((*self.failures, floor)) - floor",
    ),
    Mutant(
        "I3",
        "silence is never death",
        "queue/leases.py",
        "        return now - seen.since < self._lease_of(presence)",
        "        return now - seen.since < float('inf')",
    ),
    Mutant(
        "I3",
        "an interruption writes a failure",
        "worker/unitruns.py",
        '            if stream.end not in ("", wire.FAILING):\n',
        '            if stream.end != "":\n'
        "                stream.lines.timed_out(left[0], 0.0, permanent=False)\n",
    ),
    Mutant(
        "I3",
        "Slurm's word is not heard",
        "queue/leases.py",
        "        if notice is not None and notice.final:\n            return",
        "        if notice is not None and not notice.final:\n            return",
    ),
    Mutant(
        "I3",
        "a file server that fails is taken for the death of all nodes",
        "queue/watch.py",
        "        if not others or len(living) < _SEVERAL:",
        "        if len(living) < _SEVERAL:",
    ),
    Mutant(
        "I5",
        "a lock that another host saw free is a death for ever",
        "queue/leases.py",
        "(freed and self._lock_is_free(worker))",
        "freed",
    ),
    Mutant(
        "I3",
        "a frozen worker that went on cannot die again",
        "queue/watch.py",
        "            self._gone.difference_update(mates)\n",
        "",
    ),
    Mutant(
        "I3",
        "a node dies with the worker that watches for it",
        "queue/watch.py",
        "max(lease_s - longest_s, _BEATS * interval_s - min(silences)[0])",
        "lease_s - longest_s",
    ),
    Mutant(
        "I3",
        "an item is to blame for the silence of its node",
        "queue/watch.py",
        'notice(name, "lease", SILENT_NODE)',
        'notice(name, "lease")',
    ),
    Mutant(
        "I3",
        "an item that silences each node is never to blame",
        "queue/state.py",
        "if len({*silent}) > 1 or len(silent)",
        "if len(silent)",
    ),
    Mutant(
        "I3",
        "all nodes that a look reaches are silent, and others are taken to live",
        "queue/watch.py",
        "(silent != [] and self._hears_behind({self.host, *silent}, looked))",
        "silent != []",
    ),
    Mutant(
        "I9",
        "an item that silences the only node that can run it is never to blame",
        "queue/state.py",
        "len({*silent}) > 1 or len(silent) >= MAX_DEATHS",
        "len({*silent}) > 1",
    ),
    Mutant(
        "I3",
        "a process that was stuck takes its own pause for others' silence",
        "queue/watch.py",
        "            self._unstuck = now",
        "            pass",
    ),
    Mutant(
        "I5",
        "a heart that beats on does not refute Slurm",
        "queue/leases.py",
        "        return None if beats_on else notice",
        "        return notice",
    ),
    Mutant(
        "I5",
        "a notice of a death asks its worker to leave",
        "queue/control.py",
        '                if record["request"] == _DRAIN:',
        '                if record["request"]:',
        ("test_queue_leases.py",),
    ),
    Mutant(
        "I4",
        "silence is measured from the wall clock of the heartbeat",
        "queue/leases.py",
        "        return now - seen.since < self._lease_of(presence)",
        "        return presence is not None and self.clock.wall() - presence.at < self.lease_s",
    ),
    Mutant(
        "I4",
        "the observer's wall clock decides",
        "queue/leases.py",
        "        now = self.clock.monotonic()\n        seen,",
        "        now = self.clock.wall()\n        seen,",
    ),
    Mutant(
        "I5",
        "a late permanent failure voids a result",
        "queue/state.py",
        "        if self.done is not None:\n            return ItemState.DONE\n        perm",
        "        if self.done is not None and not self.permanent:\n"
        "            return ItemState.DONE\n        perm",
    ),
    Mutant(
        "I5",
        "a late line changes a published state",
        "queue/state.py",
        "        if failed is not None and not self._retried(entry, item):",
        "        if failed is not None and entry < 0:",
        ("test_queue_state.py", "test_gather.py"),
    ),
    Mutant(
        "I5",
        "a late release frees the generation of another",
        "queue/assignment.py",
        "        released = generation in stage.state.units[name].released",
        "        released = bool(stage.state.units[name].released)",
    ),
    Mutant(
        "I5",
        "a worker that was overtaken goes on writing",
        "worker/unitruns.py",
        "        if self._overtaken:\n            return Outcome.OVERTAKEN",
        "        if self._overtaken:\n            return Outcome.STOPPED",
    ),
    Mutant(
        "I6",
        "a name that exists is taken for ours",
        "rundir/files.py",
        "                return read_name(path)\n        else:",
        "                return target\n        else:",
        ("test_files.py", "test_queue_log.py"),
    ),
    Mutant(
        "I6",
        "a further name that exists is taken for ours",
        "rundir/files.py",
        "    except FileExistsError:\n        raise\n",
        "    except FileExistsError:\n        return True\n",
        ("test_files.py", "test_queue_log.py"),
    ),
    Mutant(
        "I6",
        "a claim is won by looking, not by creating",
        "queue/units.py",
        "        return owner == worker",
        "        return self.generation(unit) == generation",
        ("test_queue_log.py",),
    ),
    Mutant(
        "I6",
        "a log entry counts as ours whoever made it",
        "queue/log.py",
        "won = files.create_name(self.paths.entry(number), target) == target",
        "won = bool(files.create_name(self.paths.entry(number), target))",
    ),
    Mutant(
        "I6",
        "a lock of another host is trusted",
        "queue/leases.py",
        "        if near and self._lock_is_free(worker):",
        "        if self._lock_is_free(worker):",
    ),
    Mutant(
        "I7",
        "status leaves a mark",
        "results/status.py",
        "    beside = beside or Beside()\n",
        '    (view.paths.root / "seen").touch()\n    beside = beside or Beside()\n',
    ),
    Mutant(
        "I7",
        "reading makes what is missing",
        "rundir/files.py",
        "        fd = os.open(path, os.O_RDONLY)\n    except",
        "        fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)\n    except",
        ("test_status.py",),
    ),
    Mutant(
        "I7",
        "status asks a lock who lives",
        "results/workers.py",
        "    if (presence.host, presence.boot) == here:\n",
        "    if (presence.host, presence.boot) == here:\n"
        "        import fcntl\n\n"
        "        fcntl.flock(0, fcntl.LOCK_UN)\n",
        ("test_status.py",),
    ),
    Mutant(
        "I8",
        "reading stops at a bad line",
        "rundir/journal.py",
        "                self.bad_lines[base + start] = fault\n",
        "                return\n",
    ),
    Mutant(
        "I8",
        "the check of a line is not looked at",
        "rundir/journal.py",
        "    if not is_whole(line):\n        return None\n",
        "",
    ),
    Mutant(
        "I8",
        "a damaged pass is taken for whole",
        "rundir/journal.py",
        'wanted == f"{crc32(view[start:at]):08x}"',
        "wanted",
        ("test_journal.py", "test_queue_state.py"),
    ),
    Mutant(
        "I8",
        "a torn last line is passed over for good",
        "rundir/journal.py",
        "                    self._offset = start + end\n",
        "                    self._offset = start + len(data)\n",
    ),
    Mutant(
        "I9",
        "a permanent failure is one attempt of many",
        "queue/state.py",
        "permanent = any(generation > floor for generation in self.permanent)",
        "permanent = len(self.permanent) > 99",
    ),
    Mutant(
        "I9",
        "an item that runs out of memory is tried for ever",
        "queue/state.py",
        "min(sum(floor < generation < before for generation in self.short), self.steps)",
        "sum(floor < generation < before for generation in self.short)",
    ),
    Mutant(
        "I2",
        "the first line that is read decides whether an item gets more",
        "queue/state.py",
        "        if not short and self.short:",
        "        if not short and len(self.short) > 99:",
    ),
    Mutant(
        "I3",
        "an item that runs out of memory speaks against its host",
        "queue/state.py",
        "            if not permanent and not (short and len(history.short) <= history.steps):",
        "            if not permanent:",
    ),
    Mutant(
        "I9",
        "a PermanentError is an error like others",
        "worker/attempts.py",
        "        permanent = issubclass(type(error), PermanentError)",
        "        permanent = issubclass(type(error), MemoryError)",
        ("test_unitruns.py",),
    ),
    Mutant(
        "R17",
        "what is in the log is made again",
        "queue/following.py",
        "                if (entry, position) not in self._made\n",
        "                if (entry, -1) not in self._made\n",
    ),
    Mutant(
        "R17",
        "what another worker added meanwhile is added again",
        "queue/following.py",
        "        return self._made.isdisjoint(origins)\n",
        "        return True\n",
    ),
    Mutant(
        "R17",
        "a combination is made while more of its items may come",
        "queue/following.py",
        "            if done and name not in skipped:\n",
        "            if done:\n",
    ),
    Mutant(
        "R17",
        "a stage after one that follows does not wait until that is over",
        "queue/following.py",
        "            self._others[one].is_over for one in self._stage.spec.after",
        "            True for one in self._stage.spec.after",
    ),
    Mutant(
        "R17",
        "nothing follows the seal after a retry",
        "queue/log.py",
        "        if self.sealed and not revived:\n",
        "        if self.sealed:\n",
        ("test_following.py",),
    ),
    Mutant(
        "R17",
        "an item is added when one of several items before is done",
        "queue/graph.py",
        "            if not self._left[one] and not self._entry[one]:\n",
        "            if not self._entry[one]:\n",
        ("test_following.py",),
    ),
)


@dataclass(frozen=True)
class Result:
    """The result of running the tests on a mutant."""

    caught: bool
    by: str
    """The first test that failed, or the reason why none did."""


def make_copy(target: Path) -> Path:
    """Copy the package and the tests to ``target``."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("hpc_toolkit", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def run_in(copy: Path, argv: list[str]) -> subprocess.CompletedProcess[str]:
    # A changed file may have the old size and mtime (in seconds): stale bytecode must not be used.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    return subprocess.run(
        argv, cwd=copy, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def run_tests(copy: Path, tests: tuple[str, ...], *, select: str = "") -> tuple[int, str]:
    """Run pytest on a copy; return its exit code and output."""
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line"]
    # A first failing example is enough, and a smaller one of a loop without an end takes for ever.
    argv += [
        "--timeout=30",
        "--hypothesis-profile=mutants",
        "-m",
        "not slow",
        *(["-k", select] if select else []),
    ]
    argv += [f"tests/unit/{test}" for test in tests]
    try:
        ended = run_in(copy, argv)
    except subprocess.TimeoutExpired:
        return 2, f"it did not end within {LIMIT_S:g} s"
    return ended.returncode, ended.stdout + ended.stderr


def selection(mutant: Mutant) -> str:
    """Return pytest's -k expression for the tests that name the invariant."""
    return f"test_{mutant.invariant.lower()}_"


def try_mutant(mutant: Mutant, copies: queue.SimpleQueue[Path]) -> Result:
    copy = copies.get()
    path = copy / "hpc_toolkit" / mutant.file
    text = path.read_text(encoding="utf-8")
    try:
        found = text.count(mutant.old)
        if found != 1:
            return Result(caught=False, by=f"cannot be made: {found} places in {mutant.file}")
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        code, output = run_tests(copy, mutant.tests, select=selection(mutant))
    finally:
        path.write_text(text, encoding="utf-8")
        copies.put(copy)
    if code == 1:
        failed = [line.split()[1] for line in output.splitlines() if line.startswith("FAILED")]
        return Result(caught=bool(failed), by=failed[0].rpartition("::")[2] if failed else output)
    if code == 0:
        return Result(caught=False, by="SURVIVED")
    return Result(caught=False, by=f"pytest ended with {code}:\n{output[-2000:]}")


def check_unchanged(copy: Path, mutants: list[Mutant]) -> str:
    """Return why the tests cannot judge mutants: they fail or import another package; else ""."""
    probe = "import hpc_toolkit; print(hpc_toolkit.__file__)"
    seen = run_in(copy, [sys.executable, "-c", probe])
    if not Path(seen.stdout.strip()).is_relative_to(copy):
        return f"the tests would import {seen.stdout.strip()}"
    tests = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
    select = " or ".join(sorted({selection(mutant) for mutant in mutants}))
    code, output = run_tests(copy, tests, select=select)
    return "" if code == 0 else f"the tests fail without a mutant:\n{output[-3000:]}"


def main(names: list[str]) -> int:
    """Try every mutant of the named invariants, or of all; return the exit code."""
    began = time.monotonic()
    mutants = [mutant for mutant in MUTANTS if not names or mutant.invariant in names]
    with tempfile.TemporaryDirectory() as directory:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(WORKERS):
            copies.put(make_copy(Path(directory) / str(number)))
        problem = check_unchanged(Path(directory) / "0", mutants)
        if problem:
            print(problem)
            return 1
        with ThreadPoolExecutor(WORKERS) as pool:
            results = list(pool.map(lambda mutant: try_mutant(mutant, copies), mutants))
    print_table(mutants, results)
    caught = sum(result.caught for result in results)
    print(f"\n{caught} of {len(mutants)} caught in {time.monotonic() - began:.0f} s")
    return 0 if caught == len(mutants) else 1


def print_table(mutants: list[Mutant], results: list[Result]) -> None:
    """Print each mutant with its invariant and the test that caught it."""
    print("| invariant | mutant | caught by |\n|---|---|---|")
    for mutant, result in zip(mutants, results, strict=True):
        by = result.by if result.caught else f"**{result.by}**"
        print(f"| {mutant.invariant} | {mutant.what} ({mutant.file}) | {by} |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
