"""Paths of the files of a run, and the contents of run.json (format 1, see runs/README.md)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import PASSING, TRY_AGAIN, ConfigError, RunError, near_miss, near_path
from hpc_toolkit.rundir.files import read_fresh
from hpc_toolkit.system.record import Record, fresh, replace

FORMAT = 1
"""The on-disk format that this version writes, and the newest that it reads."""
_MOST_RUNS = 8
"""Most runs that an error lists."""
_STAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


class StagePaths:
    """The files of one stage."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = root.name
        self.log = root / "log"
        self.items = root / "items"
        self.retries = root / "retries"
        self.results = root / "results"
        self.claims = root / "claims"
        self.head = root / "head"

    def entry(self, number: int) -> Path:
        return self.log / f"{number:06d}"

    def make(self) -> None:
        for path in (self.log, self.items, self.retries, self.results, self.claims):
            path.mkdir(parents=True)


class RunPaths:
    """The files of one run; no other module joins a path below a run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = root / "run.json"
        self.campaign = root / "campaign.json"
        """A campaign's settings after an update; absent until then."""
        self.workers = root / "workers"
        self.journals = root / "journals"
        self.logs = root / "logs"
        self.control = root / "control"
        self.jobs = root / "jobs"
        """Scripts and records of submitted jobs; absent if no job was submitted."""
        self.doctor = root / "doctor.json"
        """What 'hpctk doctor' proved about the filesystem; absent until then."""
        self.report = root / "report.html"
        """The default file of 'hpctk report'; a campaign writes it when it ends."""
        self.code = root / "code"
        """Copies of the files that each stage executes; absent without --copy-code."""
        self.calls = root / "calls"
        """Functions and arguments of an executor's calls that JSON does not have; or absent."""
        self.study = root / "study"
        """What the trials of an Optuna study did, one file per process; or absent."""
        self.bandit = root / "bandit"
        self.trials = self.bandit / "trials.jsonl"

    def stage(self, name: str) -> StagePaths:
        return StagePaths(self.root / "stages" / name)

    def worker(self, name: str) -> Path:
        return self.workers / f"{name}.json"

    def worker_lock(self, name: str) -> Path:
        return self.workers / f"{name}.lock"

    def journal(self, name: str) -> Path:
        return self.journals / f"{name}.jsonl"

    def values(self, name: str) -> Path:
        """A worker's value file; absent until a result needs it. As its log, of all its names."""
        return self.journals / f"{name.partition('.')[0]}.values"

    def worker_log(self, name: str) -> Path:
        return self.logs / f"{name.partition('.')[0]}.log"

    def monitor_log(self, host: str, pid: int) -> Path:
        """Samples that the monitor of one process took on its host."""
        return self.logs / f"monitor-{host.replace('/', '-')}-{pid}.jsonl"

    def make(self, stages: list[str]) -> None:
        for path in (self.workers, self.journals, self.logs, self.control, self.bandit):
            path.mkdir()
        for name in stages:
            self.stage(name).make()


CALLS = "hpc_toolkit.worker.calls:Calls"
"""The workload of an executor's run, whose functions are not known when the run is created."""
STUDY = "hpc_toolkit.study.trials:Trials"
"""That of a study's run. It also runs the user's code, and gets the run's directory as ``root``."""
WITHDRAWN = "withdrawn-"
"""Beginning of the names under which executors fail calls that nobody needs any more."""
RESULTS = "results"
"""Key in ``stored`` of an item that has results of earlier stages: where their parts are that JSON
does not have, as ``[place, worker, types]`` each."""
_OF_CALLS = {"function", "args", "kwargs", "repeat", "stored"}


def shown_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item as people see it: without the part that only its executor reads."""
    kept = item.get("stored")
    # Items of other runs may have keys of these names as well.
    is_call = type(kept) is dict and "same" in kept and item.keys() <= _OF_CALLS
    if is_call or (type(kept) is dict and kept.keys() == {RESULTS}):
        return {key: one for key, one in item.items() if key != "stored"}
    return item


def without_places(item: dict[str, Any]) -> dict[str, Any]:
    """As :func:`shown_item`, but an executor's call keeps where its arguments are."""
    kept = item.get("stored")
    return shown_item(item) if type(kept) is dict and kept.keys() == {RESULTS} else item


BY_NAME, BY_ITEM = "keys", "item"
"""How a function is called: with the keys of the item by name, or with the item."""


class WorkloadSpec(Record, kw_only=True):
    """The code that runs the items of a stage."""

    function: str | None = None
    """``module:name`` of a function or a class; exactly one of this and ``command`` is given."""
    command: str | None = None
    """A shell command with ``{key}`` placeholders, filled from the item and quoted."""
    options: dict[str, Any] = fresh(factory=dict)
    """Keyword arguments for the constructor of a class workload."""
    path: tuple[str, ...] = ()
    """Directories put in front of ``sys.path`` before the import."""
    call: str = ""
    """:data:`BY_NAME`, "keys but KEY" or :data:`BY_ITEM`; "": a class, or an older run."""
    argv: tuple[str, ...] = ()
    """``sys.argv`` of the code; (): only the file of its module. Not in the stage of run.json."""


class StageSpec(Record, kw_only=True):
    """How the items of one stage are run."""

    name: str
    """Name of the stage; a plain list has the one stage ``items``."""
    workload: WorkloadSpec
    """The code that runs the items."""
    pipefail: bool = False
    """Whether a command fails if any program of a pipe does, not only the last one."""
    group_by: str | None = None
    """Item key whose value is the item's group; None: items have no groups."""
    max_attempts: int = 3
    """An item that failed in this many generations is failed for good."""
    timeout_s: float | None = None
    """Seconds that one item may take; None: no limit."""
    no_retry: str | None = None
    """``timeout``: an item that exceeds ``timeout_s`` is failed for good; None: it is retried."""
    max_failures: str | None = None
    """Pause when more items than this failed: a count, or ``N%`` of all; None: the default rule."""
    items_per_claim: int | None = None
    """Items of each unit; None: units get smaller towards the end of the list."""
    kill_after_s: float | None = None
    """Seconds between SIGTERM and SIGKILL at a timeout; None: 5 for a command, 0 for a function."""
    max_items_per_process: int | None = None
    """Items after which a fresh process runs the next ones; None: no limit."""
    recycle_at_mib: int | None = None
    """Resident MiB of that process after which a fresh one runs the next items; None: no limit."""
    log_limit_mib: int | None = None
    """MiB of a worker's log above which its oldest output is removed; None: no limit."""
    after: tuple[str, ...] = ()
    """Earlier stages whose results make this stage's items; (): its items are given."""
    by: tuple[str, ...] | None = None
    """Keys of the items before: one item for each combination of their values; None: one for each
    item."""
    expand: bool = False
    """Whether a result is a list, of which each element makes an item of the stages after it."""
    needs: dict[str, Any] | None = None
    """What a worker must have (:data:`hpc_toolkit.system.needs.Amounts`); None, {}: nothing."""
    retry: dict[str, Any] | None = None
    """How the needs of an item grow (:class:`hpc_toolkit.system.needs.Retry`); None: not."""
    priority: int | None = None
    """Workers prefer stages with a larger number; None: 0."""

    def __post_init__(self) -> None:
        """Raise ValueError for a name that is not valid as a directory of the run."""
        if not _STAGE_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a stage name: use letters, digits, '_' and '-'")
        if self.needs or self.retry:
            from hpc_toolkit.system.needs import parse_needs, retry_of  # few runs have needs

            parse_needs(self.needs or {}, f"needs of {self.name}")
            retry_of(self)

    @property
    def final(self) -> list[str]:
        """Failures after which an item is not tried again: timeout, and names of exceptions."""
        return [name.strip() for name in (self.no_retry or "").split(",") if name.strip()]

    def differences(self, other: StageSpec) -> list[str]:
        """Names, for people, of settings that differ; the code may be in another directory."""
        work = replace(other.workload, path=self.workload.path, call=self.workload.call)
        same = replace(other, workload=work)
        names = [name for name in self.fields if getattr(self, name) != getattr(same, name)]
        return [name.removesuffix("_s").replace("_", " ") for name in names]


def list_stage(
    *,
    workload: str | None = None,
    command: str | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> StageSpec:
    """The stage of a run that is made from one list; ``settings`` are fields of StageSpec."""
    path = (str(Path.cwd()),) if workload is not None else ()
    code = WorkloadSpec(function=workload, command=command, options=options or {}, path=path)
    from hpc_toolkit.system.needs import parse_needs  # only where runs are made

    settings["needs"] = parse_needs(settings.get("needs") or {}, "needs") or None
    return StageSpec(name="items", workload=code, **settings)


class Manifest(Record, kw_only=True):
    """The definition of a run, written once when the run is created."""

    run: str
    """Name of the run: the directory's name when the run was created."""
    stages: tuple[StageSpec, ...]
    """In the order in which workers prefer them."""
    campaign: dict[str, Any] | None = None
    """The campaign's settings; None for a plain list."""
    provenance: dict[str, Any] = fresh(factory=dict)
    """Origin of the run: code hash, git commit, Python, packages, time."""

    def stage(self, name: str) -> StageSpec:
        for stage in self.stages:
            if stage.name == name:
                return stage
        hint = near_miss(name, [stage.name for stage in self.stages])
        raise RunError(f"run {self.run!r} has no stage {name!r}", hint=hint)

    def to_bytes(self) -> bytes:
        record = {
            "format": FORMAT,
            "run": self.run,
            "stages": [_stage_record(stage) for stage in self.stages],
            "campaign": self.campaign,
            "provenance": self.provenance,
        }
        return (json.dumps(record, indent=2) + "\n").encode()


_RARE: dict[str, tuple[type, ...]] = {
    "kill_after_s": (int, float),
    "max_items_per_process": (int,),
    "recycle_at_mib": (int,),
    "log_limit_mib": (int,),
    "needs": (dict,),
    "retry": (dict,),
    "priority": (int,),
}
"""Settings that ``run.json`` has only where they were given."""


def _stage_record(stage: StageSpec) -> dict[str, Any]:
    work = stage.workload
    named = {"function": work.function} if work.function else {"command": work.command}
    call = {"call": work.call} if work.call else {}
    return {
        "name": stage.name,
        "workload": {**named, **call, "options": work.options, "path": list(work.path)},
        "pipefail": stage.pipefail,
        "group_by": stage.group_by,
        "max_attempts": stage.max_attempts,
        "timeout_s": stage.timeout_s,
        "no_retry": stage.no_retry,
        "max_failures": stage.max_failures,
        "items_per_claim": stage.items_per_claim,
        **{name: value for name in _RARE if (value := getattr(stage, name)) is not None},
        **({"after": list(stage.after)} if stage.after else {}),
        **({} if stage.by is None else {"by": list(stage.by)}),
        **({"expand": True} if stage.expand else {}),
    }


def read_manifest(root: Path) -> Manifest:
    """Read ``root/run.json``; RunError if it is missing, unreadable, damaged or too new."""
    path = root / "run.json"
    try:
        data = read_fresh(path)
    except NotADirectoryError as error:
        message = f"{root} is a file, not a run"
        end = f": {root.parent}" if root.name == "run.json" else "; -o names a file that is written"
        raise RunError(message, hint=f"name the run's directory{end}") from error
    except OSError as error:
        message = f"{path}: {error.strerror}"
        if error.errno not in PASSING:
            hint = "check the owner, the permissions and the mount"
            raise RunError(message, hint=hint) from error
        hint = "try again when the filesystem answers"
        raise RunError(message, hint=hint, exit_code=TRY_AGAIN) from error
    if not data:
        hint = near_path(root, "make one with 'hpctk init', or name another directory")
        if inside := all_runs(root):
            hint = f"it contains runs: {_listed(inside)}"
        raise RunError(f"{root} is not a run: it has no run.json", hint=hint)
    try:
        record = json.loads(data)
        found = record["format"]
        if not isinstance(found, int) or found > FORMAT:
            message = f"{path}: format {found!r}; this hpctk reads formats up to {FORMAT}"
            raise RunError(message, hint="upgrade hpctk to the version that made the run")
        return parse_manifest(record)
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"{path} is damaged: {type(error).__name__}: {error}"
        raise RunError(message, hint="restore it from a backup; nothing can replace it") from error


def _expect(value: Any, *kinds: type | None) -> Any:
    if not any(value is None if kind is None else isinstance(value, kind) for kind in kinds):
        wanted = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
        raise TypeError(f"{json.dumps(value)[:80]} is not of type {wanted}")
    return value


def parse_manifest(record: dict[str, Any]) -> Manifest:
    """Build a manifest from the JSON object in run.json.

    Raises KeyError, TypeError, AttributeError, ValueError, ConfigError: it is not a manifest.
    """
    stages = tuple(
        StageSpec(
            name=stage["name"],
            workload=WorkloadSpec(
                function=_expect(stage["workload"].get("function"), str, None),
                command=_expect(stage["workload"].get("command"), str, None),
                options=_expect(stage["workload"]["options"], dict),
                path=tuple(_expect(one, str) for one in stage["workload"]["path"]),
                call=_expect(stage["workload"].get("call", ""), str),
            ),
            group_by=_expect(stage["group_by"], str, None),
            max_attempts=_expect(stage["max_attempts"], int),
            timeout_s=_expect(stage["timeout_s"], int, float, None),
            max_failures=_expect(stage["max_failures"], str, None),
            # Absent in older runs.
            pipefail=_expect(stage.get("pipefail", False), bool),
            no_retry=_expect(stage.get("no_retry"), str, None),
            items_per_claim=_expect(stage.get("items_per_claim"), int, None),
            **{
                name: _expect(stage[name], *kinds) for name, kinds in _RARE.items() if name in stage
            },
            after=tuple(_expect(one, str) for one in stage.get("after", ())),
            by=tuple(_expect(one, str) for one in stage["by"]) if "by" in stage else None,
            expand=_expect(stage.get("expand", False), bool),
        )
        for stage in record["stages"]
    )
    return Manifest(
        run=_expect(record["run"], str),
        stages=stages,
        campaign=_expect(record["campaign"], dict, None),
        provenance=_expect(record["provenance"], dict),
    )


def find_run(given: str | None, environ: dict[str, str] | None = None) -> Path:
    """The run for a command: the argument, else $HPCTK_RUN, else the only run below ./runs."""
    named = given or (os.environ if environ is None else environ).get("HPCTK_RUN")
    if named:
        return Path(named)
    runs = all_runs()
    if len(runs) == 1:
        return runs[0]
    found = _listed(runs) or "none"
    message = f"no run is named, and ./runs contains: {found}"
    raise ConfigError(message, hint="name one as the argument, or set HPCTK_RUN")


def refuse_removed(root: Path) -> None:
    if not (root / "run.json").exists():
        raise RunError(f"{root}: run.json is missing", hint="the run was removed or moved")


def all_runs(directory: Path = Path("runs")) -> list[Path]:
    return sorted(path.parent for path in directory.glob("*/run.json"))


def _listed(runs: list[Path]) -> str:
    return ", ".join(map(str, runs[:_MOST_RUNS])) + (", ..." if runs[_MOST_RUNS:] else "")
