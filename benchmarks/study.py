"""Is a study on the workers of a run as good as Optuna's own, and what does a trial cost?

    python benchmarks/study.py [--seeds 10] [--trials 100] [--workers 4] [--write]

The same TPE sampler minimises two functions: with ``hpctk study``, with processes that share
Optuna's JournalStorage file or SQLite database, and with threads on its in-memory storage. All
four take turns with each seed. Compared are the best values, and the seconds that a worker spends
per trial beside the objective, from its first trial to its last. Exit code 0 if no median of ours
is worse than the worst of Optuna's four, and a trial takes less time than with SQLite.

Takes 10 minutes on 2 cores. Needs the extra ``optuna``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import optuna
from arguments import directory, number, parser
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from resultsfile import facts, table, write_section

from hpc_toolkit import study as ours

_SLEEP_S = 0.01
KINDS = ("hpctk", "journal", "sqlite", "memory")


def hartmann(trial: optuna.Trial) -> float:
    """Hartmann's function of six numbers; its minimum is -3.32237."""
    import math

    a: tuple[list[float], ...] = ([10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14])
    a += ([3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14])
    p: tuple[list[float], ...] = (
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
    )
    p += ([2348, 1451, 3522, 2883, 3047, 6650], [4047, 8828, 8732, 5743, 1091, 381])
    x = [trial.suggest_float(f"x{at}", 0, 1) for at in range(6)]
    return -sum(
        weight * math.exp(-sum(u * (v - w / 1e4) ** 2 for u, v, w in zip(some, x, at, strict=True)))
        for weight, some, at in zip((1.0, 1.2, 3.0, 3.2), a, p, strict=True)
    )


def conditional(trial: optuna.Trial) -> Any:
    """A choice, a logarithmic and an integer parameter, and one that only a choice has."""
    rate = trial.suggest_float("rate", 1e-5, 1, log=True)
    depth = trial.suggest_int("depth", 1, 32)
    kind = trial.suggest_categorical("kind", ["a", "b", "c"])
    more = trial.suggest_float("more", 0, 1) if kind == "b" else 1.0
    import math

    return (math.log10(rate) + 2.5) ** 2 + (depth - 11) ** 2 / 50 + (more - 0.3) ** 2


FUNCTIONS = {"hartmann": hartmann, "conditional": conditional}


def objective(trial: optuna.Trial) -> Any:
    """The function and the file for times that the environment names."""
    value = FUNCTIONS[os.environ["BENCH_FUNCTION"]](trial)
    time.sleep(_SLEEP_S)
    with open(os.environ["BENCH_TIMES"], "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {time.monotonic()}\n")
    return value


def _sampler() -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(constant_liar=True)


def storage_of(kind: str, base: Path) -> Any:
    if kind == "journal":
        return JournalStorage(JournalFileBackend(str(base / "study.log")))
    return optuna.storages.RDBStorage(
        f"sqlite:///{base / 'study.db'}", engine_kwargs={"connect_args": {"timeout": 100}}
    )


def share(kind: str, base: Path, trials: int) -> None:
    """One of several processes that share a study."""
    study = optuna.load_study(study_name="s", storage=storage_of(kind, base), sampler=_sampler())
    study.optimize(objective, n_trials=trials)


def best_of(kind: str, base: Path, trials: int, workers: int, seed: int) -> float:
    """The best value of a new study, after all its trials."""
    if kind == "hpctk":
        path = (str(Path(__file__).parent),)
        run = ours.create(base / "run", "study:objective", trials, seed=seed, path=path)
        run.work(workers)
        return float(ours.load(run).best_value)
    if kind == "memory":
        study = optuna.create_study(sampler=_sampler())
        study.optimize(objective, n_trials=trials, n_jobs=workers)
        return float(study.best_value)
    study = optuna.create_study(study_name="s", storage=storage_of(kind, base))
    argv = [sys.executable, __file__, "--share", kind, str(base), str(trials // workers)]
    processes = [subprocess.Popen(argv) for _ in range(workers)]
    assert [one.wait() for one in processes] == [0] * workers
    assert len(study.trials) == trials // workers * workers
    return float(study.best_value)


def seconds_of(times: Path) -> float:
    """Seconds of a worker per trial, beside the objective; the mean over workers."""
    by: dict[str, list[float]] = defaultdict(list)
    for line in times.read_text("utf-8").splitlines():
        by[line.split()[0]].append(float(line.split()[1]))
    spans = [((ends[-1] - ends[0]), len(ends) - 1) for ends in by.values() if len(ends) > 1]
    return sum(span for span, _ in spans) / sum(count for _, count in spans) - _SLEEP_S


def measure(seeds: int, trials: int, workers: int) -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for seed in range(seeds):
        for function in FUNCTIONS:
            for kind in KINDS[seed % 4 :] + KINDS[: seed % 4]:
                with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
                    base = Path(name)
                    os.environ |= {"BENCH_FUNCTION": function, "BENCH_TIMES": f"{base / 'times'}"}
                    best = best_of(kind, base, trials, workers, seed)
                    found[kind, function].append((best, seconds_of(base / "times")))
                print(json.dumps([seed, function, kind, *found[kind, function][-1]]), flush=True)
    return found


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if sys.argv[1:2] == ["--share"]:
        share(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return
    given = parser(__doc__)
    given.add_argument("--seeds", type=number, default=10, help="studies of each kind")
    given.add_argument("--trials", type=number, default=100, help="of each study")
    given.add_argument("--workers", type=number, default=4, help="processes, or threads")
    given.add_argument("--dir", type=directory, help="where studies are made")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    os.environ["BENCH_DIR"] = str(options.dir or tempfile.gettempdir())
    found = measure(options.seeds, options.trials, options.workers)
    middle = {
        key: [statistics.median(one) for one in zip(*some, strict=True)]
        for key, some in found.items()
    }
    head = ["study", *(f"{name}: best, median" for name in FUNCTIONS), "seconds per trial"]
    rows, costs = [], {}
    for kind in KINDS:
        costs[kind] = statistics.median(s for name in FUNCTIONS for _, s in found[kind, name])
        bests = [f"{middle[kind, name][0]:.4g}" for name in FUNCTIONS]
        rows.append([kind, *bests, "" if kind == "memory" else f"{costs[kind]:.3f}"])
    lines = table(head, rows)
    said = f"{options.seeds} seeds, {options.trials} trials, {options.workers} workers."
    print("\n".join([said, *lines]))
    if options.write:
        where = facts(Path(os.environ["BENCH_DIR"]))
        write_section("Studies", [where, "", said, "", *lines])
    good = all(
        middle["hpctk", name][0] <= max(middle[kind, name][0] for kind in KINDS[1:])
        for name in FUNCTIONS
    )
    sys.exit(0 if good and costs["hpctk"] < costs["sqlite"] else 1)


if __name__ == "__main__":
    main()
