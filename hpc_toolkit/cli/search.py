"""Commands of searches other than campaigns: bandit bench, study."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpc_toolkit.cli.arguments import argument, outputs, show, write_outputs
from hpc_toolkit.cli.help import SEARCH, Commands
from hpc_toolkit.cli.lists import SETTINGS, read_settings
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import Option, Panels, flag, many
from hpc_toolkit.system.quantities import parse_counts

if TYPE_CHECKING:
    from hpc_toolkit.bandit.bench.comparison import Entrant
    from hpc_toolkit.bandit.bench.replay import ScoreTable


_BENCH: Panels = {
    "Options": (
        Option(
            "table",
            "A campaign's run, scores (.csv, .csv.gz), or synthetic[:SEED].",
            "FILE",
            default="synthetic",
        ),
        Option("policies", "all, or e.g. gp-ucb:initial=8.", "NAMES", default="random,gp-ucb"),
        Option("seeds", "Number of searches per policy.", "N", default=10),
        Option("asks", "Arms evaluated at once: one, rounds:N or window:N.", default="one"),
        Option("pulls", "Arms per search; 0 means all.", "N", default=60),
        Option("until", "End a search at this share of the best reward, e.g. 0.99.", "NUMBER"),
        Option("gpus", "Numbers of GPUs to simulate.", "N,N", default="1,32"),
        Option("first_seed", "First random seed.", "N", default=0, hidden=True),
        many("out", "Write .json or .csv", "FILE")._replace(short="-o"),
        flag("json", "Print JSON."),
    )
}
"""Most are fields of Plan."""


_NOT_HERE = {"workload", "command", "pipefail", "option", "group_by", "items_per_claim"}
_SEVERAL = "minimize or maximize; of several objectives: minimize,maximize."
_STUDY: Panels = {
    "Options": (
        Option("trials", "Number of trials; each has one result.", "N", least=1),
        Option("workers", "Local workers; 0 only creates the run.", "N", default=1, least=0),
        Option("run", "Run directory. [default: runs/MODULE-NAME]", "DIR"),
        Option("sampler", "Optuna's sampler.", "tpe|gp|cmaes|random", default="tpe"),
        Option("pruner", "Optuna's pruner.", "hyperband|median|none", default="none"),
        Option("direction", _SEVERAL, "NAMES", short="--directions", default="minimize"),
        Option("seed", "Seed of the sampler.", "N"),
    ),
    "Limits": tuple(one for one in SETTINGS["Workload and limits"] if one.name not in _NOT_HERE),
}


def register(app: Commands) -> None:
    group = Commands(
        "bandit",
        panel=SEARCH,
        hidden=True,
        help="""Compare search policies on recorded scores.

        Examples:
            hpctk bandit bench --table scores.csv --policies random,gp-ucb
        """,
    )
    group.add(bench, _BENCH)
    app.add_command(group)
    app.add(study, _STUDY, panel=SEARCH)


def bench(**given: Any) -> None:
    """Compare policies by searches on recorded or synthetic scores.

    Prints how many evaluations each policy needs to find an arm with 99 % of the best reward: the
    median, and the number that is enough in 9 of 10 searches. Ctrl-C keeps the policies that are
    finished.

    Examples:
        hpctk bandit bench
        hpctk bandit bench --table scores.csv --policies random,gp-ucb -o bench.json
    """
    from hpc_toolkit.bandit.bench.comparison import Plan, entrants, reports
    from hpc_toolkit.bandit.bench.replay import Asks

    gc.enable()
    table, as_json = given.pop("table"), bool(given.pop("json"))
    out = outputs(given.pop("out"), (".json", ".csv"))
    given |= {
        "entrants": entrants(given.pop("policies")),
        "asks": Asks.parse(given["asks"]),
        "pulls": given["pulls"] or None,
        "first": given.pop("first_seed"),
        "gpus": parse_counts(given["gpus"], "--gpus", most=999_999),
    }
    plan = Plan(**given)
    report: dict[str, Any] = {}
    try:
        for latest in reports(_read(table), plan, _progress(plan.seeds)):
            report = latest
    finally:
        # Of an interrupted comparison, and of one that an error ends, what is finished is kept.
        if report:
            _show(report, out, as_json=as_json)


def _read(given: str) -> ScoreTable:
    name, _, seed = given.partition(":")
    if name == "synthetic" and (seed or "0").isdecimal():
        from hpc_toolkit.bandit.bench.replay import score_table

        return score_table(int(seed or "0"))
    path = Path(given)
    if path.is_dir():
        from hpc_toolkit.campaign.evaluations import scores_of_run

        return scores_of_run(path)
    head = ""
    # The reader of other tables reports a file that cannot be read.
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        head = file.readline() if path.suffix == ".csv" else ""
    if "value.score" in head.rstrip().split(","):  # gathered scores of a campaign
        from hpc_toolkit.campaign.evaluations import scores_of_table

        return scores_of_table(path)
    from hpc_toolkit.results.scoretable import read_score_table

    return read_score_table(path)


def _show(report: dict[str, Any], out: list[Path], *, as_json: bool) -> None:
    """Print first: what cannot be written is not lost then."""
    from hpc_toolkit.bandit.bench.comparison import as_csv, as_lines

    show(report, as_lines(report), as_json=as_json)
    if report["left_out"]:
        print(f"not finished, left out: {', '.join(report['left_out'])}", file=sys.stderr)
    as_json_lines = json.dumps(report, allow_nan=False) + "\n"
    write_outputs(out, {".json": lambda: as_json_lines, ".csv": lambda: as_csv(report)})


def _progress(total: int) -> Callable[[Entrant, int], None] | None:
    """A callback that shows on a terminal how far the searches are; None elsewhere."""
    if not sys.stderr.isatty():
        return None

    def tell(entrant: Entrant, done: int) -> None:
        line = f"{entrant.label}: search {done + 1} of {total}"
        end = "\n" if done + 1 == total else ""
        print(f"\r{line}\x1b[K", end=end, file=sys.stderr, flush=True)

    return tell


def study(
    objective: Annotated[
        str, argument("FILE.py:NAME", "Function of an optuna.Trial; or MODULE:NAME.")
    ],
    **given: Any,
) -> None:
    """Run trials of an Optuna objective on workers, without a database.

    Prints the run's directory. The same command again continues; 'hpctk work' and 'hpctk submit'
    send more workers. Exits with 75 if trials are left.

    Examples:
        hpctk study tune.py:objective --trials 200 --workers 8 --run runs/tune
        hpctk study tune.py:objective --trials 90 --pruner hyperband --seed 1
    """
    from hpc_toolkit.study import create
    from hpc_toolkit.worker.pool import work_elsewhere
    from hpc_toolkit.worker.worker import WorkerOptions

    named = {one.name: given.pop(one.name) for one in _STUDY["Options"]}
    workers, root = named.pop("workers"), named.pop("run")
    if named["trials"] is None:
        raise ConfigError("a number of trials is needed", hint="add --trials N")
    _, settings, _ = read_settings({"config": None, **given})
    file, _, name = objective.rpartition(":")
    path = [str(Path.cwd())]
    if file.endswith(".py"):  # as Python starts a script: its directory comes first
        path.insert(0, str(Path(file).resolve().parent))
        objective = f"{Path(file).stem}:{name}"
    root = root or Path("runs", re.sub(r"[^\w.-]+", "-", objective))
    directions = named.pop("direction").split(",")
    run = create(root, objective, **named, directions=directions, path=(*path,), **settings)
    print(run.root, flush=True)
    # Optuna has started threads, so the workers' parent is another process; it prints the end.
    if workers and (code := work_elsewhere(run.root, workers, WorkerOptions(), None)):
        sys.exit(code)
