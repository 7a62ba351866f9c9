"""Optuna studies on the workers of a run, without a database: create a study, and read it.

The items of the run are the trials of the study.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.calls import code_path, name_of
from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.queue.items import Item, check_items
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir.layout import STUDY, StageSpec, list_stage
from hpc_toolkit.rundir.pickles import dumps, refusal
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.record import replace
from hpc_toolkit.worker.code import collect_provenance
from hpc_toolkit.worker.fingerprints import of_function
from hpc_toolkit.worker.loading import new_manifest

if TYPE_CHECKING:
    import optuna

SAMPLERS, PRUNERS = ("tpe", "gp", "cmaes", "random"), ("hyperband", "median", "none")
DIRECTIONS = ("minimize", "maximize")
_NEEDS = {"cmaes": ["cmaes"], "gp": ["torch"]}
"""Name of a sampler -> packages that it needs beside Optuna."""


def create(
    root: str | Path,
    objective: Callable[[optuna.Trial], Any] | str,
    trials: int,
    *,
    sampler: optuna.samplers.BaseSampler | str = "tpe",
    pruner: optuna.pruners.BasePruner | str = "none",
    directions: Sequence[str] = ("minimize",),
    seed: int | None = None,
    enqueue: Iterable[dict[str, Any]] = (),
    path: tuple[str, ...] | None = None,
    **settings: Any,
) -> Run:
    """Create the run of a study, or open it if it was created with the same arguments.

    Any worker runs its trials: ``run.work(8)``, ``hpctk work``, or a job.

    Args:
        root: the directory of the run.
        objective: a function of an ``optuna.Trial``, or ``module:name`` of one.
        trials: how many there are, with those of ``enqueue``; each has one result.
        sampler: one of Optuna's samplers, or ``tpe``, ``gp``, ``cmaes`` or ``random``.
        pruner: one of Optuna's pruners, or ``hyperband``, ``median`` or ``none``.
        directions: ``minimize`` or ``maximize`` for each objective.
        seed: of the sampler. The parameters of a trial follow from this seed, its number and what
            is known of other trials when it starts; with several workers, that is never the same.
        enqueue: parameters of the first trials, as ``Study.enqueue_trial`` takes them.
        path: directories to import the objective from; None: those of this program.
        settings: fields of a stage, such as ``max_attempts`` and ``timeout_s``.

    Raises ConfigError: an argument is not valid, a package is missing, or the run was created with
    other arguments; WorkloadError: the objective cannot be imported.
    """
    given = [(sampler, SAMPLERS), (pruner, PRUNERS), *((one, DIRECTIONS) for one in directions)]
    for word, known in given:
        if isinstance(word, str) and word not in known:
            raise ConfigError(f"{word!r} is not one of {', '.join(known)}")
    _need("optuna", *_NEEDS.get(str(sampler), ()))
    named = (True, objective) if isinstance(objective, str) else name_of(objective)
    code = "" if named[0] else of_function(objective)[0]
    options = {
        "objective": named[1] if named[0] else _kept(objective, "the objective", code),
        "directions": [*directions],
        "sampler": _kept(sampler, "sampler"),
        "pruner": _kept(pruner, "pruner"),
        "seed": seed,
    }
    stage = list_stage(workload=STUDY, options=options, items_per_claim=1, **settings)
    work = replace(stage.workload, path=code_path() if path is None else path)
    items: list[Item] = [{"trial": at, "params": one} for at, one in enumerate(enqueue)]
    items += [{"trial": at} for at in range(len(items), trials)]
    if len(items) > trials:
        raise ConfigError(f"{len(items)} trials are enqueued, and trials is {trials}")
    return _run_of(Path(root), replace(stage, workload=work), items)


def _need(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            message = f"the study needs {package}, which is not installed"
            raise ConfigError(message, hint=how_to_add(package))


def _kept(given: Any, what: str, code: str = "") -> Any:
    """An option of the workload as run.json has it: a word, or an object as its pickle.

    Pickles of equal objects may differ, so the type of an object, or its ``code``, is compared.
    """
    if isinstance(given, str):
        return given
    try:
        data = dumps(given)
    except Exception:  # noqa: BLE001 - of methods of the user
        raise ConfigError(refusal(given, what).message) from None
    return {"pickle": b64encode(data).decode(), "of": code or type(given).__name__}


def _run_of(root: Path, stage: StageSpec, items: list[Item]) -> Run:
    lines = check_items(items, group_by=None)
    if not root.exists():
        manifest = new_manifest(root, stage)
        name = stage.workload.options["objective"]
        if isinstance(name, str):  # the user's file is what may change, and not the workload's
            user = replace(stage, workload=replace(stage.workload, function=name))
            found = collect_provenance((user,))
            manifest.provenance.update({key: found[key] for key in ("code", "files")})
        return create_run(root, manifest, {"items": lines}, sealed=True)
    run = Run.open(root)
    before = run.manifest.stages[0]
    mine, theirs = _options(stage), _options(before)
    changed = [name for name in mine if mine[name] != theirs.get(name)]
    changed += before.differences(replace(stage, workload=before.workload))
    if run.manifest.campaign is not None or run.items() != items:
        changed.append("trials")
    if changed:
        message = f"{root} was created with other {' and '.join(changed)}"
        raise ConfigError(message, hint="choose another directory, or remove this one")
    return run


def _options(stage: StageSpec) -> dict[str, Any]:
    options = stage.workload.options
    return {key: one["of"] if isinstance(one, dict) else one for key, one in options.items()}


def load(run: Run | str | Path) -> optuna.Study:
    """The study of a run, to read: also while workers run, and as each call finds it.

    A trial is FAIL once its item failed for good, and RUNNING or WAITING while that is pending.

    Raises RunError: the run is not a study.
    """
    _need("optuna")
    import optuna

    from hpc_toolkit.study.trials import TrialFiles, TrialStorage, outcome

    run = run if isinstance(run, Run) else Run.open(run)
    if run.manifest.stages[0].workload.function != STUDY:
        message = f"{run.root} is not a study"
        raise RunError(message, hint="'hpctk study' makes one; 'hpctk gather' reads any run")
    rows = [run.values.restored(row) for row in run.table(partial=True) if row["state"] == "done"]
    settled = {row["item"]["trial"]: outcome(row["value"]) for row in rows}
    storage = TrialStorage(TrialFiles(run.paths, run.manifest, settled))
    return optuna.load_study(study_name=run.manifest.run, storage=storage)
