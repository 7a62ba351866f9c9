"""Workers are killed and frozen inside their items, again and again: is every item there, once?

    python benchmarks/kill_storm.py [--items 2000] [--kills 40] [--freezes 2] [--workers 8]

Every kill is a SIGKILL to a worker, its executor, or both, while the item's own trace says that it
runs; a kill that came too late, because the item had just ended, is not counted. A freeze stops a
worker inside an item by SIGSTOP, lets the item's result wait in the pipe, and wakes the worker when
its unit was finished elsewhere, so that its line comes late. Exit code 0 if nothing was lost or
charged.

Takes about as long as the items do on that many workers, a quarter of a minute by default. Needs
nothing.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import number, number_or_none, parser, seconds
from ending import ended
from tracefile import Execution, Trace, lives, send, wait_for

from hpc_toolkit.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable

_KINDS = ("worker", "executor", "both")


@dataclass(slots=True)
class Tally:
    """What the storm did."""

    kills: Counter[str] = field(default_factory=Counter)
    """Hits by what was killed."""
    misses: int = 0
    """Kills whose item had just ended."""
    late: list[int] = field(default_factory=list)
    """For each worker that was frozen: lines that it wrote for its unit after it woke."""
    frozen: set[int] = field(default_factory=set)
    """Workers that must not be killed now."""


class Storm:
    """Kills and freezes the workers of one run while it goes on."""

    def __init__(self, run: Run, trace: Trace, pool: subprocess.Popen[bytes], seed: int) -> None:
        self._run = run
        self._trace = trace
        self._pool = pool
        self._random = random.Random(seed)
        self.tally = Tally()

    def kill(self) -> bool:
        """Kill one worker inside an item; whether it was inside, or None of them was."""
        target = self._wait_inside()
        kind = _KINDS[sum(self.tally.kills.values()) % len(_KINDS)]
        victims = {
            "worker": (target.worker,),
            "executor": (target.executor,),
            "both": (target.worker, target.executor),
        }[kind]
        send(signal.SIGKILL, *victims)
        wait_for(lambda: not lives(target.executor), "the executor to be gone")
        self._trace.poll()
        if target.ended is not None:
            self.tally.misses += 1
            return False
        self.tally.kills[kind] += 1
        return True

    def freeze(self) -> Callable[[], bool]:
        """Freeze one worker inside an item; what wakes it when its unit was finished elsewhere."""
        target = self._wait_inside()
        send(signal.SIGSTOP, target.worker)
        self.tally.frozen.add(target.worker)
        wait_for(lambda: self._ended(target), "the frozen worker's item to end")
        send(signal.SIGSTOP, target.executor)
        stage = self._run.view.stages["items"]
        self._run.view.poll()
        unit = stage.log.segments[1].unit_of(target.item)
        (journal,) = self._run.paths.journals.glob(f"*-{target.worker}-*.jsonl")
        size = journal.stat().st_size

        def wake() -> bool:
            self._run.view.poll()
            if unit.name in stage.state.open:
                return False
            send(signal.SIGCONT, target.executor, target.worker)
            wait_for(lambda: journal.stat().st_size > size, "the late line")
            with journal.open("rb") as file:
                file.seek(size)
                late = [json.loads(line) for line in file.read().splitlines()]
            names = [line["type"] for line in late if line["unit"] == f"items/{unit.name}"]
            self.tally.late.append(names.count("done"))
            self.tally.frozen.discard(target.worker)
            return True

        return wake

    @property
    def ended(self) -> bool:
        """Whether the command that works has left."""
        return self._pool.poll() is not None

    def _wait_inside(self) -> Execution:
        end = time.monotonic() + 60.0
        while time.monotonic() < end and not self.ended:
            found = [one for one in self._trace.inside() if one.worker not in self.tally.frozen]
            # Not the one that is about to end.
            found = [one for one in found if time.time() - one.started < 0.02]
            if found:
                return self._random.choice(found)
            time.sleep(0.001)
        message = "no worker is inside an item"
        raise TimeoutError(message)

    def _ended(self, target: Execution) -> bool:
        self._trace.poll()
        return target.ended is not None


def rage(storm: Storm, trace: Trace, *, items: int, kills: int, freezes: int) -> None:
    """Spread the kills and freezes over the run."""
    waking: list[Callable[[], bool]] = []
    frozen = 0
    while sum(storm.tally.kills.values()) < kills or waking or frozen < freezes:
        hits = sum(storm.tally.kills.values())
        trace.poll()
        if storm.ended:
            message = f"error: the workers ended after {hits} kills: give more or longer items"
            raise SystemExit(message)
        share = trace.finished / items
        if frozen < freezes and share > 0.1 + 0.4 * frozen / max(freezes, 1):
            waking.append(storm.freeze())
            frozen += 1
        elif hits < kills and share >= 0.02 + 0.8 * hits / kills:
            storm.kill()
        waking = [wake for wake in waking if not wake()]
        time.sleep(0.005)


def report(run: Run, trace: Trace, tally: Tally, status: dict[str, Any]) -> tuple[str, bool]:
    """A table of what happened, and whether all is well."""
    rows = run.results()
    trace.poll()
    total = status["stages"]["items"]["total"]
    ids = Counter(row["item"]["id"] for row in rows)
    attempts = Counter(row["attempts"] for row in rows)
    ended = Counter(one.item for one in trace.executions if one.ended is not None)
    facts = {
        "items": total,
        "gathered": len(rows),
        "done": sum(row["state"] == "done" for row in rows),
        "lost": total - len(ids),
        "gathered twice": sum(count > 1 for count in ids.values()),
        "attempts": dict(attempts),
        "kills inside an item": dict(tally.kills) | {"all": sum(tally.kills.values())},
        "kills that came too late": tally.misses,
        "workers started": len(list(run.paths.workers.glob("*.json"))),
        "frozen workers, late lines": tally.late,
        "executions begun": len(trace.executions),
        "executions ended": trace.finished,
        "items ended more than once": sum(count > 1 for count in ended.values()),
        "status: duplicates": status["stages"]["items"]["duplicates"],
        "status: deaths": status["deaths"],
        "status: workers": status["workers"],
        "status: warnings": len(status["warnings"]),
    }
    fine = (
        len(rows) == len(ids) == facts["done"] == total
        and set(attempts) == {1}
        # One that sees first that it was overtaken writes nothing (rule R4); of several, not all.
        and (any(tally.late) or len(tally.late) < 2)
        and status["complete"]
    )
    return "\n".join(f"{name:<28}{value}" for name, value in facts.items()), fine


def main() -> int:
    """Parse, run the storm, print."""
    options = parser(__doc__)
    options.add_argument("--items", type=number, default=2000, help="in the list")
    options.add_argument("--seconds", type=seconds, default=0.05, help="length of an item")
    options.add_argument("--kills", type=number_or_none, default=40, help="that hit inside an item")
    options.add_argument("--freezes", type=number_or_none, default=2, help="of workers")
    options.add_argument("--workers", type=number, default=8, help="that are started")
    options.add_argument("--lease", default="2s", help="of their claims")
    options.add_argument("--seed", type=int, default=1, help="of whom is hit")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-storm-") as directory:
        trace = Trace(Path(directory, "trace"))
        items = [
            {"id": number, "seconds": given.seconds, "trace": str(Path(directory, "trace"))}
            for number in range(given.items)
        ]
        run = Run.create(
            Path(directory, "run"), items, workload="hpc_toolkit.science.workloads.synthetic:Sleep"
        )
        began = time.monotonic()
        argv = [sys.executable, "-m", "hpc_toolkit", "work", str(run.root)]
        argv += ["--workers", str(given.workers), "--lease", given.lease]
        pool = subprocess.Popen(argv)
        with ended(pool):
            storm = Storm(run, trace, pool, given.seed)
            rage(storm, trace, items=given.items, kills=given.kills, freezes=given.freezes)
            code = pool.wait(timeout=600)
        took = time.monotonic() - began
        text, fine = report(run, trace, storm.tally, run.status().to_json())
        print(text)
        print(f"{'exit code of hpctk work':<28}{code}")
        print(f"{'wall time':<28}{took:.1f} s")
    return 0 if fine and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
