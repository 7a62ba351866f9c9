"""Forecasts of 'hpctk plan' beside what came: real runs of local workers, and simulated ones.

    python benchmarks/plan_forecast.py [--runs 1] [--simulated 20] [--write]

Each run is planned once, as soon as 5 % of its items have ended, with nothing but what its
directory holds then, and goes on to its end. Items only sleep; how long each does is drawn, and
the directory does not hold it. Shapes:

- lognormal: 800 items without groups, median 0.8 s, sigma 0.7;
- groups: 160 groups of 5 items and 4 sets of sibling groups, which differ, 1 s to load each group;
- growing: 700 items whose mean grows with their size, which is in the item; with a tail: 1 of 50
  takes 8 times as long;
- sorted: the same in the order of size, so that the first 5 % are the smallest. No real run;
- constant, shortest first, longest first, linear, exponential, blocks: 800 items without any key;
  lognormal ones in order, or means that grow with the place, 10 times, 16 times, or 1, 4, 16. No
  real run;
- models: 120 checkpoints of 8 sizes of one model, the smallest first. No real run;
- layers: layer by layer, later ones take longer; the first 5 % are of layers 0 and 1. No real run.

Simulated runs are of the same shapes with other seeds, ten times as long, on the queue's own code
with a virtual clock. ``--write`` puts the table into benchmarks/results.md.

Takes about eight minutes: four for one real run of each shape, three at a time, since their
workers only sleep, and four for 20 simulated ones of each. Needs nothing but the package.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from arguments import number_or_none, parser
from resultsfile import facts, table, write_section
from simulation.cluster import simulate
from simulation.scenario import Group, Scenario
from simulation.worker import STAGE

from hpc_toolkit.planning.forecast import Forecaster
from hpc_toolkit.planning.reading import read_work
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec, WorkloadSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.worker import VirtualClock

    from hpc_toolkit.planning.forecast import Interval

WORKERS = 4
CREATING = Lock()
"""Held while one real run is made: what it reads is the environment of this process."""
SHARE = 0.05


@dataclass(frozen=True)
class Shape:
    """Items with how long each takes, which the items do not say."""

    items: list[dict[str, Any]]
    seconds: list[float]
    group_by: str | None = None
    load_s: float = 0.0


def lognormal(seed: int) -> Shape:
    chance = random.Random(seed)
    items = [{"id": n} for n in range(800)]
    return Shape(items, [chance.lognormvariate(-0.22, 0.7) for _ in items])


def grouped(seed: int) -> Shape:
    chance = random.Random(seed)
    items, seconds = [], []
    for n in range(160):
        family = n // 40
        level = 0.35 * 1.6**family * chance.lognormvariate(0.0, 0.15)
        for layer in range(5):
            items.append({"checkpoint": f"model{'abcd'[family]}@step{n % 40}", "layer": layer})
            seconds.append(level * chance.lognormvariate(0.0, 0.25))
    return Shape(items, seconds, "checkpoint", 1.0)


def growing(seed: int, *, in_order: bool = False) -> Shape:
    chance = random.Random(seed)
    sizes = [100 + 3 * n for n in range(700)]
    if not in_order:
        chance.shuffle(sizes)
    items = [{"id": n, "size": size} for n, size in enumerate(sizes)]
    seconds = []
    for item in items:
        mean = 0.1 * (item["size"] / 100) ** 0.9
        seconds.append(mean * chance.lognormvariate(0, 0.3) * (8 if chance.random() < 0.02 else 1))
    return Shape(items, seconds)


def models(seed: int) -> Shape:
    chance = random.Random(seed)
    sizes = {"70m": 0.07, "160m": 0.16, "410m": 0.41, "1b": 1.0, "1.4b": 1.4, "2.8b": 2.8}
    sizes |= {"6.9b": 6.9, "12b": 12.0}
    items, seconds = [], []
    for size, billions in sizes.items():
        level = 0.8 * billions**0.6 * chance.lognormvariate(0.0, 0.15)
        for step in range(15):
            own = level * chance.lognormvariate(0.0, 0.1)
            for layer in range(6):
                items.append({"checkpoint": f"pythia-{size}@step{step * 1000}", "layer": layer})
                seconds.append(own * (1 + 0.1 * layer) * chance.lognormvariate(0.0, 0.15))
    return Shape(items, seconds, "checkpoint", 1.0)


def layers(seed: int) -> Shape:
    chance = random.Random(seed)
    items = [{"layer": layer, "checkpoint": f"m@step{n}"} for layer in range(24) for n in range(30)]
    return Shape(
        items, [0.2 * (1 + 0.15 * (n // 30)) * chance.lognormvariate(0.0, 0.25) for n in range(720)]
    )


def by_position(seed: int, course: Callable[[float], float], noise: float = 0.3) -> Shape:
    """Items of which nothing is known but their positions."""
    chance = random.Random(seed)
    seconds = [course(n / 800) * chance.lognormvariate(0.0, noise) for n in range(800)]
    return Shape([{"id": n} for n in range(800)], seconds)


def arranged(seed: int, *, reverse: bool) -> Shape:
    shape = lognormal(seed)
    return Shape(shape.items, sorted(shape.seconds, reverse=reverse))


SHAPES: dict[str, Callable[[int], Shape]] = {
    "constant": partial(by_position, course=lambda _: 1.0, noise=0.0),
    "shortest first": partial(arranged, reverse=False),
    "longest first": partial(arranged, reverse=True),
    "linear": partial(by_position, course=lambda at: 0.2 + 1.8 * at),
    "exponential": partial(by_position, course=lambda at: 0.2 * 16.0**at),
    "blocks": partial(by_position, course=lambda at: 0.2 * 4.0 ** int(3 * at)),
    "lognormal": lognormal,
    "groups": grouped,
    "growing": growing,
    "sorted": partial(growing, in_order=True),
    "models": models,
    "layers": layers,
}
REAL = ("lognormal", "groups", "growing")


class Hidden:
    """The workload of the real runs: sleeps as long as a file beside the run says.

    ``HPCTK_PLAN_SECONDS`` names it, so that neither the items nor run.json tell how long they take.
    """

    def __init__(self) -> None:
        told = json.loads(Path(os.environ["HPCTK_PLAN_SECONDS"]).read_text())
        self._load_s = told["load_s"]
        self._seconds = {json.dumps(item, sort_keys=True): s for item, s in told["items"]}

    def load(self, _group: Any) -> None:
        time.sleep(self._load_s)

    def run(self, _context: None, items: Any) -> Any:
        for item in items:
            time.sleep(self._seconds[json.dumps(item, sort_keys=True)])
            yield {}


@dataclass(frozen=True)
class Result:
    """One run, planned and ended."""

    shape: str
    seed: int
    low_s: float
    median_s: float
    high_s: float
    real_s: float

    @property
    def error(self) -> float:
        return self.median_s / self.real_s - 1.0

    @property
    def inside(self) -> bool:
        return self.low_s <= self.real_s <= self.high_s


def played(name: str, seed: int, root: Path) -> Result:
    """A real run of local workers, planned while it works."""
    shape = SHAPES[name](seed)
    told = root / "seconds.json"
    pairs = list(zip(shape.items, shape.seconds, strict=True))
    told.write_text(json.dumps({"load_s": shape.load_s, "items": pairs}))
    path = root / "run"
    environ = {**os.environ, "HPCTK_PLAN_SECONDS": str(told)}
    with CREATING:
        os.environ["HPCTK_PLAN_SECONDS"] = str(told)
        os.chdir(Path(__file__).parent)
        workload = "plan_forecast:Hidden"
        run = Run.create(path, shape.items, workload=workload, group_by=shape.group_by)
    argv = [sys.executable, "-m", "hpc_toolkit", "work", str(path), "--workers", str(WORKERS)]
    with (root / "work.out").open("wb") as out:
        work = subprocess.Popen(argv, env=environ, stdout=out, stderr=out)
        while sum(counts.done for counts in run.status().stages.values()) < SHARE * len(pairs):
            assert work.poll() is None, (root / "work.out").read_text()
            time.sleep(0.05)
        plan = json.loads(hpctk("plan", str(path), "--json"))
        assert work.wait() == 0
    assert run.status().complete
    real_s = run.view.throughput.until - plan["at"]
    left_s = plan["now"]["time_s"]
    return Result(name, seed, left_s["low"], left_s["median"], left_s["high"], real_s)


def played_alone(name: str, seed: int) -> Result:
    """The same in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        found = played(name, seed, Path(directory))
    told(found, "real")
    return found


def hpctk(*argv: str) -> str:
    command = [sys.executable, "-m", "hpc_toolkit", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedScenario(Scenario):
    """A scenario with the items of a shape."""

    given: tuple[dict[str, Any], ...]

    def items(self) -> list[dict[str, Any]]:
        return list(self.given)


def rehearsed(name: str, seed: int, *, times: float = 10.0) -> Result:
    """The same on the queue's own code with a virtual clock."""
    shape = SHAPES[name](seed)
    by = shape.group_by
    keys = [str(item[by]) if by else "all" for item in shape.items]
    groups = tuple(
        Group(tuple(of), times * shape.load_s)
        for key in dict.fromkeys(keys)
        if (of := [times * s for k, s in zip(keys, shape.seconds, strict=True) if k == key])
    )
    given = tuple(
        {"group": k, **item} if by else item for k, item in zip(keys, shape.items, strict=True)
    )
    grouped_by = "group" if by else None
    scenario = ShapedScenario(
        groups=groups, workers=WORKERS, seed=seed, given=given, group_by=grouped_by
    )
    spec = StageSpec(name=STAGE, workload=WorkloadSpec(function="none:none"), group_by=grouped_by)
    manifest = Manifest(run="simulated", stages=(spec,))
    found: list[tuple[float, Interval]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:

        def look(clock: VirtualClock) -> None:
            view = RunView(RunPaths(Path(directory)), manifest)
            forecaster = Forecaster(read_work(view, clock, given="simulated"), seed=seed)
            found.append((clock.now, forecaster.forecast(None).time_s))

        count = math.ceil(SHARE * len(shape.items))
        outcome = simulate(scenario, Path(directory), look=(count, look))
    at, time_s = found[0]
    real_s = outcome.makespan_s - at
    return Result(name, seed, time_s.low, time_s.median, time_s.high, real_s)


def summary(kind: str, name: str, results: list[Result]) -> list[str]:
    errors = [abs(one.error) for one in results]
    width = statistics.median(one.high_s / one.low_s for one in results)
    return [
        kind,
        name,
        str(len(results)),
        f"{statistics.median(one.real_s for one in results):,.0f} s",
        f"{statistics.median(errors):.1%}",
        f"{max(errors):.1%}",
        f"{sum(one.inside for one in results)} of {len(results)}",
        f"{width:.2f}",
    ]


HEAD = ["run", "shape", "runs", "rest took, median", "median error", "largest", "inside 90 %"]
HEAD += ["high / low, median"]


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--runs", type=number_or_none, default=1, help="real runs of each shape")
    given.add_argument("--simulated", type=number_or_none, default=20, help="seeds of each shape")
    given.add_argument("--first-seed", type=number_or_none, default=1)
    given.add_argument("--shapes", default=",".join(SHAPES), help="which")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    gc.disable()  # as hpctk does
    rows: list[list[str]] = []
    lines: list[str] = []
    first = options.first_seed
    names = options.shapes.split(",")
    runs = [(n, seed) for n in names if n in REAL for seed in range(first, first + options.runs)]
    with ThreadPoolExecutor(len(REAL)) as pool:
        real = list(pool.map(played_alone, *zip(*runs, strict=True))) if runs else []
    for name in names:
        mine = [one for one in real if one.shape == name]
        rows += [summary("real", name, mine)] if mine else []
    for name in options.shapes.split(","):
        seeds = range(100 * first, 100 * first + options.simulated)
        simulated = []
        for seed in seeds:
            simulated.append(rehearsed(name, seed))
            told(simulated[-1], "simulated")
            gc.collect()
        rows += [summary("simulated", name, simulated)] if simulated else []
    errors = [abs(one.error) for one in real]
    kept = not real or (statistics.median(errors) <= 0.2 and all(one.inside for one in real))
    lines = [
        facts(),
        "",
        f"{WORKERS} workers; each run was planned once, when {SHARE:.0%} of its items had ended,",
        "from the contents of its directory at that moment. Errors are errors of the median, as",
        "shares of the time that the rest took.",
        "",
        *table(HEAD, rows),
        "",
        "Target for the real runs: median error at most 20 %, each inside its interval; "
        + ("met." if kept else "MISSED."),
    ]
    print("\n".join(lines))
    if options.write:
        write_section("Forecasts", lines)
    sys.exit(0 if kept else 1)


def told(one: Result, kind: str) -> None:
    print(
        f"{kind} {one.shape} {one.seed}: {one.median_s:.1f} s "
        f"({one.low_s:.1f} to {one.high_s:.1f}), real {one.real_s:.1f} s, {one.error:+.1%}",
        "" if one.inside else "OUTSIDE",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
