"""Optuna studies on the workers of a run, without a database: create a study, and read it.

The items of the run are the trials of the study; the arms of a campaign can be read as trials too.
"""

from __future__ import annotations

import json
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

    from hpc_toolkit.bandit.arms import Column

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

    Of a campaign: its arms that were requested or have results, in this order. A trial is COMPLETE
    if its arm has a reward over the tasks by which the best arm was compared: all tasks, or those
    of a race. It is FAIL if it has results of these tasks and no reward, and else RUNNING, or
    PRUNED once the search is over. ``user_attrs`` are the arm's name, its scores, the standard
    error of its reward, and its seconds; the times of trials are that of this call.

    Raises RunError: the run is neither.
    """
    _need("optuna")
    import optuna

    from hpc_toolkit.study.trials import TrialFiles, TrialStorage, outcome

    run = run if isinstance(run, Run) else Run.open(run)
    if run.manifest.campaign is not None:
        return _of_campaign(run)
    if run.manifest.stages[0].workload.function != STUDY:
        message = f"{run.root} is not a study or a campaign"
        raise RunError(message, hint="'hpctk study' makes one; 'hpctk gather' reads any run")
    rows = [run.values.restored(row) for row in run.table(partial=True) if row["state"] == "done"]
    settled = {row["item"]["trial"]: outcome(row["value"]) for row in rows}
    storage = TrialStorage(TrialFiles(run.paths, run.manifest, settled))
    return optuna.load_study(study_name=run.manifest.run, storage=storage)


def _of_campaign(run: Run) -> optuna.Study:
    import optuna
    from optuna.trial import TrialState

    from hpc_toolkit.bandit.arms import columns_of
    from hpc_toolkit.campaign.search import score_of
    from hpc_toolkit.campaign.settings import settings_of
    from hpc_toolkit.campaign.summary import searched_of

    found = searched_of(run.view, settings_of(run.view.paths, run.manifest))
    campaign, over = found.campaign, found.compared
    keys = {one.id: dict(one.keys) for one in found.arms.arms}
    arms = list(keys.values())
    rewards = found.rewards(found.arms.ids, over)
    columns = columns_of(arms, campaign.rows.features if campaign.rows else {})
    spaces = {one.key: _space(one, arms) for one in columns}
    study = optuna.create_study(study_name=run.manifest.run, direction="maximize")
    for arm in dict.fromkeys([*found.asked, *found.rows]):
        rows, reward = found.rows.get(arm, {}), rewards.get(arm)
        told = {"arm": arm, **{f"score.{task}": score_of(row) for task, row in rows.items()}}
        told["seconds"] = sum(row["seconds"] for row in rows.values())
        state = TrialState.PRUNED if found.sealed else TrialState.RUNNING
        if reward is not None:
            state, told["stderr"] = TrialState.COMPLETE, reward.stderr
        elif rows.keys() >= set(over):
            state = TrialState.FAIL
        given = {key: _plain(value) for key, value in keys[arm].items() if value is not None}
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=None if reward is None else reward.mean,
                params=given,
                distributions={key: spaces[key] for key in given},
                user_attrs=told,
            )
        )
    return study


def _space(column: Column, arms: list[dict[str, Any]]) -> optuna.distributions.BaseDistribution:
    """The values of a key, which are all that a policy could choose."""
    from optuna import distributions as kinds

    from hpc_toolkit.bandit.arms import LINEAR, LOG

    values = [arm[column.key] for arm in arms if arm.get(column.key) is not None]
    types, log = {type(value) for value in values}, column.kind == LOG
    if column.kind in (LINEAR, LOG) and types <= {int, float}:
        kind = kinds.IntDistribution if types == {int} else kinds.FloatDistribution
        return kind(min(values), max(values), log=log)
    return kinds.CategoricalDistribution(list(dict.fromkeys(map(_plain, values))))


def _plain(value: Any) -> Any:
    """A value as Optuna has choices: others than numbers and text are JSON."""
    return value if isinstance(value, str | int | float) else json.dumps(value, sort_keys=True)


def export(run: Run, target: str) -> None:
    """Copy what :func:`load` returns to an Optuna storage: a URL, or a file of its JournalStorage.

    Optuna's own messages below warnings are turned off.

    Raises ConfigError: the storage has a study of this name, or cannot be written.
    """
    _need("optuna")
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = load(run)
    try:
        file = JournalFileBackend(target) if "://" not in target else None
        storage = target if file is None else optuna.storages.JournalStorage(file)
        named = {"study_name": study.study_name, "directions": study.directions}
        optuna.create_study(storage=storage, **named).add_trials(study.trials)
    except Exception as error:
        message = f"{target}: {type(error).__name__}: {error}"
        hint = "name a new file, or a URL such as sqlite:///study.db"
        raise ConfigError(message, hint=hint) from error
