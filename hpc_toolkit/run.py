"""The Python interface of a run, which the command line uses as well."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.queue.control import ask_to_drain
from hpc_toolkit.queue.items import Item, ItemLines
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir.files import grant, writing
from hpc_toolkit.rundir.layout import STUDY, Manifest, RunPaths, list_stage, read_manifest
from hpc_toolkit.rundir.trust import refuse_untrusted
from hpc_toolkit.system.clock import Seldom, SystemClock
from hpc_toolkit.system.record import replace

if TYPE_CHECKING:
    from hpc_toolkit.planning import Countdown
    from hpc_toolkit.results.status import Beside, Status
    from hpc_toolkit.results.tables import Row, Table
    from hpc_toolkit.rundir.valuefiles import Values
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.worker.worker import WorkerOptions

MAX_WORKERS = 1024
"""Largest number of workers in one pool; more on one machine is a mistake."""


class Run:
    """One run directory; create it with :meth:`create`, or open it with :meth:`open`.

    >>> from hpc_toolkit import Run
    >>> items = [{"seed": seed} for seed in range(3)]
    >>> with Run.create("runs/bench", items, workload="bench:iterate") as run:
    ...     code = run.work(2)
    ...     print(run.status().complete, run.results()[1]["item"], run.columns()["state"])
    True {'seed': 1} ['done', 'done', 'done']

    Between calls no file is open. Leaving a ``with`` block only frees what was read: workers
    elsewhere go on. An instance serves one thread.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root = root
        self.paths = RunPaths(root)
        self.manifest = manifest
        self._view: RunView | None = None
        self._countdown: Countdown | None = None
        self._search: Seldom[dict[str, Any]] | None = None
        grant(root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._view = self._countdown = self._search = None

    @classmethod
    def open(cls, root: str | Path) -> Run:
        """Open an existing run; methods that execute or change it also check that it is trusted.

        Raises RunError: not a run, damaged, or of a newer format.
        """
        return cls(Path(root), read_manifest(Path(root)))

    @classmethod
    def create(
        cls,
        root: str | Path,
        items: Iterable[Item] = (),
        *,
        stages: Mapping[str, Mapping[str, Any]] | None = None,
        workload: str | None = None,
        command: str | None = None,
        pipefail: bool = False,
        options: dict[str, Any] | None = None,
        group_by: str | None = None,
        max_attempts: int = 3,
        timeout_s: float | None = None,
        no_retry: str | None = None,
        max_failures: str | None = None,
        items_per_claim: int | None = None,
        kill_after_s: float | None = None,
        max_items_per_process: int | None = None,
        recycle_at_mib: int | None = None,
        log_limit_mib: int | None = None,
        needs: Mapping[str, Any] | None = None,
        retry: Mapping[str, Any] | None = None,
        open_end: bool = False,
        copy_code: bool = False,
    ) -> Run:
        """Create a run from one list of items, or of stages; a failure leaves nothing behind.

        Args:
            root: the directory, which must not exist.
            items: JSON objects, no two equal, read once; none is allowed if ``open_end`` is set.
                An item with an ``id`` and a list ``after`` of ids runs when these items are done.
            stages: instead of all arguments but ``copy_code``, those of each stage by its name, and
                ``after`` (names of stages whose results make its items), ``by`` (keys: each
                combination of values makes one) or ``expand`` (each element of a result does).
            workload: ``module:name`` of a function or class; the current directory is importable. A
                function gets an item's keys by name if they fit its parameters, else the item.
            command: a shell command with ``{key}`` placeholders, instead of ``workload``.
            pipefail: the command fails if any program of a pipe does.
            options: keyword arguments of a class workload.
            group_by: key of the items whose value is their group.
            max_attempts: failures after which an item is failed.
            timeout_s: seconds that one item may take.
            no_retry: failures after which an item is not tried again, separated by commas:
                ``timeout``, or names of exceptions such as ``ValueError`` with its subclasses.
            max_failures: pause the run if more items than this fail, ``N`` or ``P%``.
            items_per_claim: items that a worker claims at once; by default fewer towards the end.
            kill_after_s: seconds from SIGTERM to SIGKILL at a timeout; by default 5 for a command.
            max_items_per_process: items after which a fresh process runs the next ones.
            recycle_at_mib: resident MiB of the process after which a fresh one runs the next items.
            log_limit_mib: MiB of a worker's log above which its oldest output is removed.
            needs: what a worker must have, such as ``{"gpus": 1, "memory": "40G"}``.
            retry: more of it after a failure: ``{"on": "oom", "memory": "x2", "up_to": "200G"}``.
            open_end: leave the run open for more items; otherwise it is sealed.
            copy_code: copy the files of code into the run, for its workers.

        Raises ItemsError, ConfigError, WorkloadError, RunError: nothing was created.
        """
        from hpc_toolkit.worker.loading import new_manifest
        from hpc_toolkit.worker.stages import manifest_of, with_items

        if stages is not None:
            manifest, given = manifest_of(root, stages, copy_code=copy_code)
            return create_run(Path(root), manifest, given, sealed=True)
        stage = list_stage(
            workload=workload,
            command=command,
            pipefail=pipefail,
            options=options,
            group_by=group_by,
            max_attempts=max_attempts,
            timeout_s=timeout_s,
            no_retry=no_retry,
            max_failures=max_failures,
            items_per_claim=items_per_claim,
            kill_after_s=kill_after_s,
            max_items_per_process=max_items_per_process,
            recycle_at_mib=recycle_at_mib,
            log_limit_mib=log_limit_mib,
            needs=needs,
            retry=retry,
        )
        manifest = new_manifest(root, stage, copy_code=copy_code)
        spec, lines = with_items(manifest.stages[0], items, may_be_empty=open_end)
        manifest = replace(manifest, stages=(spec,))
        return create_run(Path(root), manifest, {"items": lines}, sealed=not open_end)

    def add(self, items: Iterable[Item], *, stage: str = "items") -> None:
        """Add items to an open stage; each must be new.

        Raises ItemsError for the items, and RunError if the stage is sealed or a campaign's.
        """
        from hpc_toolkit.queue.items import add_items
        from hpc_toolkit.worker.command import needed_keys

        self._refuse_campaign()
        refuse_untrusted(self.root)
        spec = self.manifest.stage(stage)
        if spec.after:
            message = f"the items of stage {stage!r} of {self.root} follow others"
            raise RunError(message, hint="create another run for more items")
        log, keys = StageLog(self.paths.stage(stage)), needed_keys(spec.workload.command)
        with writing(self.root):
            add_items(log, list(items), spec, keys)

    def seal(self) -> None:
        """Seal every stage: no more items can be added. RunError for a campaign."""
        self._refuse_campaign()
        refuse_untrusted(self.root)
        for name in [one.name for one in self.manifest.stages if not one.after]:
            with writing(self.root):
                log = StageLog(self.paths.stage(name))
                log.poll()
                log.seal()

    def work(
        self,
        workers: int | None = None,
        options: WorkerOptions | None = None,
        *,
        shares: Shares | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> int:
        """Work here until nothing is left; the exit code (see :mod:`hpc_toolkit.worker.worker`).

        If ``workers`` is None, this process is the only worker; inside an srun step it takes its
        share of the node's GPUs (:func:`hpc_toolkit.system.gpus.rank_environment`). Otherwise a
        pool starts ``workers`` processes, binds each to its ``shares`` of this machine, and
        replaces those that are killed; if this process has threads, as in a notebook, the pool runs
        in a fresh interpreter. Raises HpcToolkitError: the run is paused, its code cannot be
        loaded, or its disk is full.
        """
        from hpc_toolkit.system.gpus import rank_environment
        from hpc_toolkit.worker.pool import Pool, work_elsewhere
        from hpc_toolkit.worker.worker import WorkerOptions, start_worker

        refuse_untrusted(self.root)
        options, paths, manifest = options or WorkerOptions(), self.paths, self.manifest
        if workers is None:
            os.environ.update(rank_environment(os.environ))
            return start_worker(paths, manifest, options, SystemClock())
        if not 1 <= workers <= MAX_WORKERS:
            message = f"workers must be 1 to {MAX_WORKERS}, got {workers}"
            raise ConfigError(message, hint="use one per core, or one per GPU")
        if len(os.listdir("/proc/self/task")) > 1:
            return work_elsewhere(self.root, workers, options, on_tick, shares)
        pool = Pool(paths=paths, manifest=manifest, options=options, workers=workers, shares=shares)
        return pool.run(on_tick)

    def status(
        self,
        *,
        forecast: bool = True,
        seen: dict[str, Presence | None] | None = None,
        beside: Beside | None = None,
    ) -> Status:
        """Read the run's current status; writes nothing.

        Without a ``forecast`` of the time left it takes less time. ``seen`` are the workers'
        presences; None: read them. ``beside``: what the status has from other sources.
        """
        from hpc_toolkit.results.status import Beside, read_status

        given, campaign, beside = str(self.root), self.manifest.campaign, beside or Beside()
        about: Any = {"given": given, "campaign": campaign is not None, "seen": seen}
        read = partial(read_status, self.view, SystemClock(), **about)
        if not forecast:
            return read(beside=beside)
        from hpc_toolkit.planning import Countdown

        self._countdown = self._countdown or Countdown(self.view, campaign=campaign, given=given)
        is_study = self.manifest.stages[0].workload.function == STUDY
        if campaign is not None or is_study:
            if is_study:
                from hpc_toolkit.results.gather import study_so_far as search_of
            else:
                from hpc_toolkit.campaign.summary import search_of
            self._search = self._search or Seldom()
            search = partial(search_of, self.view, self.manifest, self._search)
            beside = replace(beside, search=search)
        return read(forecast=self._countdown.read, beside=beside)

    def _repr_html_(self) -> str:
        from hpc_toolkit.report.terminal import status_html

        return status_html(self.status())

    def results(self, *, stage: str | None = None, partial: bool = False) -> list[Row]:
        """One row per item, in the items' order; publishes the table of a complete stage.

        A row has ``item``, ``state`` (``done`` or ``failed``), ``value`` or ``error``,
        ``attempts``, ``seconds`` and ``worker``. A value is what the code returned; a tensor is on
        the CPU; one that cannot be restored is a RunError, with a warning. Raises NotCompleteError
        if items are pending, and ``partial`` is not set; partial rows may still change. RunError:
        other users could have changed the code that reading a value runs.
        """
        return list(self.values.restored_rows(self.table(stage=stage, partial=partial)))

    def columns(self, *, stage: str | None = None, partial: bool = False) -> dict[str, list[Any]]:
        """The rows of :meth:`results` as columns, named as in the files of ``hpctk gather``.

        ``pandas.DataFrame(run.columns())`` is a data frame. Values that are neither numbers nor
        text are JSON. Raises as :meth:`results` does.
        """
        from hpc_toolkit.results.tables import columns_of

        return columns_of(self.table(stage=stage, partial=partial))

    def table(self, *, stage: str | None = None, partial: bool = False) -> Table:
        """Like :meth:`results`, but values in the JSON form that ``hpctk gather`` writes.

        ``types`` of a row, if it is there, says what the JSON form replaces.
        """
        from hpc_toolkit.results.gather import gather

        spec = self.manifest.stage(stage) if stage else self.manifest.stages[-1]
        with writing(self.root):
            return gather(self.view, spec.name, partial=partial)

    def items(self) -> list[Item]:
        """The items of a run with one list, in the order in which they were given."""
        if self.manifest.campaign is not None or any(one.after for one in self.manifest.stages):
            message = f"{self.root} has several stages, or items that follow others"
            raise RunError(message, hint=f"'hpctk gather {self.root} --stage NAME' writes its rows")
        self.view.poll_logs()
        (stage,) = self.view.stages.values()
        found: list[Item] = []
        for segment in stage.log.segments.values():
            numbered = zip(map(segment.number, range(segment.count)), segment.items(), strict=True)
            found += [json.loads(line) for _, line in sorted(numbered)]
        return found

    def retry(self, *, match: str = "", item: str | None = None) -> int:
        """Give failed items a full budget of attempts again; return how many.

        This includes pending items that have failed so far, so that a paused run can go on.
        ``match``: only items whose JSON or last error contains this text; ``item``: only this item,
        given as its number from 0 or a part of its JSON.
        """
        from hpc_toolkit.results.explain import find_item, retry_failed

        refuse_untrusted(self.root)
        with writing(self.root):
            only = find_item(self.view, item) if item is not None else None
            return sum(retry_failed(self.view, s, match, only) for s in self.view.stages.values())

    def drain(self) -> int:
        """Ask running workers to exit after their current item; return how many were asked.

        A request cannot be withdrawn, and workers that start later are not affected (rule R16).
        """
        from hpc_toolkit.results.workers import reachable_workers

        refuse_untrusted(self.root)
        if names := sorted(reachable_workers(self.view, SystemClock())):
            ask_to_drain(self.paths, names)
        return len(names)

    @property
    def view(self) -> RunView:
        """This process's view of the run, kept so that reading again costs little."""
        if self._view is None:
            self._view = RunView(self.paths, self.manifest)
        return self._view

    @cached_property
    def values(self) -> Values:
        """Reads results as Python had them, from rows of :meth:`table`."""
        from hpc_toolkit.rundir.valuefiles import Values

        return Values(self.paths)

    def _refuse_campaign(self) -> None:
        if self.manifest.campaign is not None:  # a seal cannot be undone
            hint = f"'hpctk submit campaign --run {self.root}' or 'hpctk campaign run' continues"
            raise RunError(f"{self.root} is a campaign: only its coordinator adds items", hint=hint)


def create_run(
    root: Path, manifest: Manifest, items: Mapping[str, list[Item] | ItemLines], *, sealed: bool
) -> Run:
    """Create a run as :func:`hpc_toolkit.queue.items.create_directory` does."""
    from hpc_toolkit.queue.items import create_directory
    from hpc_toolkit.worker.code import copy_code

    fill = partial(copy_code, manifest=manifest)
    create_directory(root, manifest, items, sealed=sealed, fill=fill)
    return Run(root, manifest)
