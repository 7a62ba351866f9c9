"""The study command: the trials of an Optuna objective on the workers of a run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpc_toolkit.cli.arguments import argument
from hpc_toolkit.cli.help import SEARCH, Commands
from hpc_toolkit.cli.lists import SETTINGS, read_settings
from hpc_toolkit.cli.mapping import work_here
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import Option

if TYPE_CHECKING:
    from hpc_toolkit.system.options import Panels

_NOT_HERE = {"workload", "command", "pipefail", "option", "group_by", "items_per_claim"}
PANELS: Panels = {
    "Options": (
        Option("trials", "Number of trials; each has one result.", "N", least=1),
        Option("workers", "Local workers; 0 creates the run only. [default: 1]", "N", least=0),
        Option("run", "Run directory. [default: runs/MODULE-NAME]", "DIR"),
        Option("sampler", "Optuna's sampler.", "tpe|gp|cmaes|random", default="tpe"),
        Option("pruner", "Optuna's pruner.", "hyperband|median|none", default="none"),
        Option("directions", "minimize or maximize, or several: minimize,maximize.", "NAMES"),
        Option("direction", "The same for one objective.", "minimize|maximize"),
        Option("seed", "Seed of the sampler.", "N"),
        Option("export", "Copy the study to FILE.log or sqlite:///FILE, for Optuna.", "FILE|URL"),
    ),
    "Limits": tuple(one for one in SETTINGS["Workload and limits"] if one.name not in _NOT_HERE),
}


def register(app: Commands) -> None:
    app.add(study, PANELS, panel=SEARCH)


def study(
    objective: Annotated[
        str | None, argument("[FILE.py:NAME]", "Function of an optuna.Trial; or MODULE:NAME.")
    ] = None,
    **given: Any,
) -> None:
    """Run trials of an Optuna objective on workers, without a database.

    Prints the run's directory. The same command again continues; 'hpctk work' and 'hpctk submit'
    send more workers. Exits with 75 if trials are left.

    Examples:
        hpctk study tune.py:objective --trials 200 --workers 8 --run runs/tune
        hpctk study tune.py:objective --trials 90 --pruner hyperband --seed 1
        hpctk study --run runs/tune --export study.log
    """
    from hpc_toolkit.run import Run
    from hpc_toolkit.study.studies import create, export

    named = {name: given.pop(name) for name in [one.name for one in PANELS["Options"]]}
    if objective is not None:
        run = create(**_arguments(objective, named), **read_settings({"config": None, **given})[1])
    elif named["run"] is None or named["export"] is None:
        hint = "add FILE.py:NAME and --trials N, or --run DIR and --export FILE"
        raise ConfigError("no objective is named", hint=hint)
    else:
        run = Run.open(Path(named["run"]))
    print(run.root, flush=True)
    if objective is not None and named["workers"] != 0 and not run.status(forecast=False).complete:
        work_here(run, named["workers"] or 1)
    if named["export"] is not None:
        export(run, named["export"])


def _arguments(objective: str, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of :func:`hpc_toolkit.study.create`."""
    file, colon, name = objective.rpartition(":")
    if not colon or named["trials"] is None:
        missing = "--trials" if colon else "the name of the function"
        hint = "such as 'hpctk study tune.py:objective --trials 200'"
        raise ConfigError(f"{missing} is missing", hint=hint)
    path = [os.getcwd()]
    if file.endswith(".py"):  # as Python starts a script: its directory comes first
        path.insert(0, str(Path(file).resolve().parent))
        objective = f"{Path(file).stem}:{name}"
    if named["direction"] and named["directions"]:
        raise ConfigError("--direction and --directions are the same", hint="give one of them")
    directions = named["directions"] or named["direction"] or "minimize"
    root = named["run"] or Path("runs", re.sub(r"[^\w.-]+", "-", objective))
    keys = ("trials", "sampler", "pruner", "seed")
    return {
        "root": root,
        "objective": objective,
        "directions": [one.strip() for one in directions.split(",")],
        "path": tuple(dict.fromkeys(path)),
        **{key: named[key] for key in keys},
    }
