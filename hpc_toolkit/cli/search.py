"""``hpctk study``: trials of an Optuna objective."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

from hpc_toolkit.cli.arguments import argument
from hpc_toolkit.cli.help import SEARCH, Commands
from hpc_toolkit.cli.lists import SETTINGS, read_settings
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import Option, Panels

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
    app.add(study, _STUDY, panel=SEARCH)


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
