"""What do thousands of workers ask of a file server? Simulated, and counted by kind.

    python benchmarks/simulate_nfs.py [--workers 32 256 1024] [--steps N] [--write]

The workers run the queue's own code in simulated time, on files that a simulated NFS server
answers for; simulation/fileserver.py says what it does not model. With ``--steps``, a campaign's
coordinator adds a task for each worker, waits for the results, and adds the next ones.

Takes two minutes of one processor for up to 1,024 workers; 4,096 workers with one checkpoint each
take as long and 2 GiB, and each of their steps takes two minutes. Needs nothing.
"""

from __future__ import annotations

import math
import random
import resource
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arguments import number, parser
from resultsfile import facts, table, write_section
from simulate import LAYERS
from simulation.cluster import simulate
from simulation.fileserver import FileServer
from simulation.scenario import Group, Kill, Scenario

if TYPE_CHECKING:
    from simulation.scenario import Outcome

_PER_HOST = 8
_PARTS = (0.0, 0.1, 0.25)
_SHOWN = 18
_TASK_S = 20.0


@dataclass
class Run:
    """One simulation and what the server counted."""

    outcome: Outcome
    server: FileServer

    @property
    def workers(self) -> int:
        return self.outcome.scenario.workers

    @property
    def requests(self) -> int:
        return self.server.requests.total()

    def per_s(self, since: float = 0.0, until: float = math.inf) -> float:
        """Requests a second in an interval."""
        until = min(until, self.outcome.makespan_s)
        found = sum(n for at, n in self.server.per_s.items() if since <= at < until)
        return found / (until - since)


def tick_s(workers: int) -> float:
    return 1.0 if workers <= 256 else 5.0


def checkpoints(workers: int, each: int) -> Scenario:
    steps = each * workers // len(LAYERS)
    groups = tuple(Group((5.0,) * layers, 15.0, 25.0) for layers in LAYERS for _ in range(steps))
    return Scenario(
        groups=groups, workers=workers, workers_per_host=_PER_HOST, tick_s=tick_s(workers)
    )


def power_cuts(calm: Scenario, part: float) -> Scenario:
    """A part of the hosts, but at least one, lose power at half of the lower bound."""
    lost = random.Random(1).sample(range(calm.hosts), max(1, round(part * calm.hosts)))
    kills = [Kill(calm.bound_s / 2, _PER_HOST * h + n) for h in lost for n in range(_PER_HOST)]
    return replace(calm, kills=tuple(kills))


def run(what: str, scenario: Scenario) -> Run:
    began, server = time.process_time(), FileServer()
    outcome = simulate(scenario, server=server)
    assert not outcome.left
    took_s = time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{scenario.workers} workers, {what}: {took_s:.1f} s of processor time, {memory:.1f} GiB",
        file=sys.stderr,
        flush=True,
    )
    return Run(outcome, server)


HEAD = ["workers", "items", "makespan / bound", "requests", "a worker", "an item",
        "creations a claim", "requests/s, mean and most", "names listed, a worker"]  # fmt: skip


def row(calm: Run) -> list[str]:
    items, server = len(calm.outcome.scenario.places), calm.server
    return [
        f"{calm.workers:,}",
        f"{items:,}",
        f"{calm.outcome.ratio:.3f}",
        f"{calm.requests:,}",
        f"{calm.requests / calm.workers:.0f}",
        f"{calm.requests / items:.1f}",
        f"{server.requests['create', 'claims'] / server.made['claims']:.2f}",
        f"{calm.per_s():,.0f}, {max(server.per_s.values()):,}",
        f"{server.names_sent / calm.workers:,.0f}",
    ]


LOST = ["workers", "lost hosts", "makespan / bound", "taken over after, median and longest",
        "requests a worker", "requests/s, mean and most"]  # fmt: skip


def lost_row(cut: Run) -> list[str]:
    took = sorted(cut.outcome.takeovers_s)
    most = max(cut.server.per_s.values())
    return [
        f"{cut.workers:,}",
        f"{len(cut.outcome.scenario.kills) // _PER_HOST}",
        f"{cut.outcome.ratio:.3f}",
        f"{statistics.median(took):.0f}, {took[-1]:.0f} s of {len(took)}" if took else "-",
        f"{cut.requests / cut.workers:.0f}",
        f"{cut.per_s():,.0f}, {most:,}",
    ]


def growth(runs: list[Run]) -> list[str]:
    """How many requests of each kind a worker makes, for each number of workers."""
    first, last = runs[0], runs[-1]
    kinds = sum((one.server.requests for one in runs), Counter[tuple[str, str]]())
    shown = [kind for kind, _ in last.server.requests.most_common(_SHOWN)]
    rows = []
    for kind in sorted(shown, key=lambda one: -kinds[one]):
        each = [one.server.requests[kind] for one in runs]
        power = "-"
        if each[0] and len(runs) > 1:
            more = math.log(each[-1] / each[0]) / math.log(last.workers / first.workers)
            power = f"{more:.2f}"
        cells = [f"{n / one.workers:.2f}" for n, one in zip(each, runs, strict=True)]
        rows.append([" ".join(kind), *cells, power])
    head = ["requests a worker", *(f"{one.workers:,} workers" for one in runs), "exponent"]
    return table(head, rows)


def step(workers: int, steps: int) -> Scenario:
    """A task for each worker in each step, of arms of 32 tasks."""
    arms = (Group((_TASK_S,) * min(32, workers)),) * max(1, workers // 32)
    return Scenario(
        groups=arms, workers=workers, workers_per_host=_PER_HOST, unit_size=1, steps=steps
    )


STEPS = ["workers", "a step takes", "tasks are claimed after, median and last",
         "results are seen after the last one", "requests a task", "requests/s, most"]  # fmt: skip


def step_row(found: Run) -> list[str]:
    steps = found.outcome.steps[1:]  # in the first one all workers start
    claimed = [at - one.added_s for one in steps for at in one.claimed_s]
    last = statistics.median(max(one.claimed_s) - one.added_s for one in steps)
    seen = statistics.median(one.seen_s - max(one.ended_s) for one in steps)
    since = int(steps[0].added_s)
    counted = {at: n for at, n in found.server.per_s.items() if at >= since}
    return [
        f"{found.workers:,}",
        f"{statistics.median(one.seen_s - one.added_s for one in steps):.1f} s",
        f"{statistics.median(claimed):.1f}, {last:.1f} s",
        f"{seen:.1f} s",
        f"{sum(counted.values()) / sum(len(one.ended_s) for one in steps):.0f}",
        f"{max(counted.values()):,}",
    ]


def steps_of(workers: list[int], steps: int) -> list[str]:
    """The table of steps of a campaign."""
    found = [run(f"{steps} steps", step(n, steps)) for n in workers]
    return [
        facts(),
        "",
        "A coordinator adds one task for each worker, of arms of 32 tasks, waits for all results,",
        f"and adds the next ones. A task takes {_TASK_S:.0f} s; the policy takes no time. The",
        f"server is that of the tables above. Medians of {steps - 1} steps after the first.",
        "",
        *table(STEPS, [step_row(one) for one in found]),
    ]


WORDS = """
Requests of NFSv4.2 at the server, each of which takes a round trip of 1 ms and 0.1 ms of the one
server. Checkpoints for each worker: {each}, of 6, 6, 12 and 24 layers: 15 s to load one, 25 s for
its forward pass, 5 s a layer; default heartbeat and lease; {per_host} workers on each host, which
are the ranks of one step and start at once. The longest checkpoint takes 160 s and the mean one
100 s, so with one for each worker the bound cannot be reached. An exponent of 1 means that the
requests of a kind grow as the number of workers does.
"""


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--each", type=number, default=3, help="checkpoints of each worker")
    given.add_argument("--workers", type=number, nargs="+", default=[32, 256, 1024])
    given.add_argument(
        "--lost", type=number, nargs="*", default=[32, 256, 1024], help="with deaths"
    )
    given.add_argument("--steps", type=number, help="of a campaign, in place of checkpoints")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # three of each simulated worker
    if options.steps:
        lines = steps_of(options.workers, options.steps)
        print("\n".join(lines))
        if options.write:
            write_section("Simulated file server, steps of a campaign", lines)
        return
    calm = [run("undisturbed", checkpoints(n, options.each)) for n in options.workers]
    words = WORDS.format(each=options.each, per_host=_PER_HOST).splitlines()
    lines = [facts(), *words, "", *table(HEAD, [row(one) for one in calm])]
    lines += ["", *growth(calm)]
    if options.lost:
        cut = [
            run("power cuts", power_cuts(checkpoints(n, options.each), part))
            for n in options.lost
            for part in _PARTS
        ]
        lines += [
            "",
            "The same, and one host, a tenth or a quarter of them lose power at half of the lower",
            "bound. Locks are not proven, and Slurm is not asked. A lease is 180 s.",
            "",
        ]
        lines += table(LOST, [lost_row(one) for one in cut])
    print("\n".join(lines))
    if options.write:
        write_section(f"Simulated file server, checkpoints a worker: {options.each}", lines)


if __name__ == "__main__":
    main()
