"""Local campaigns: a campaign's run directory, local workers, and a local coordinator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_toolkit.campaign.decisions import read_decisions
from hpc_toolkit.campaign.search import as_decided, try_search
from hpc_toolkit.campaign.settings import TASKS, Campaign, changed_keys, checked_stages, settings_of
from hpc_toolkit.campaign.tables import BUDGETS
from hpc_toolkit.errors import TRY_AGAIN, ConfigError, HpcToolkitError
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.rundir.layout import Manifest
from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.worker.code import collect_provenance

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpc_toolkit.worker.worker import WorkerOptions

_LIVES = 5
"""How often the coordinator is restarted if it is always killed soon after its start."""
_LONG_LIFE_S = 600.0
"""Seconds of life after which all restarts are available again: a search takes days."""
_RIVAL_S = 10.0


def make_campaign_run(
    root: Path, campaign: Campaign, path: tuple[str, ...], file: str = "campaign"
) -> Run:
    """Create the run of a campaign; the coordinator adds its items.

    Its workloads are imported from the directories ``path``; ``file`` names the settings in error
    messages. Raises ConfigError if the search cannot work.
    """
    campaign = replace(campaign.with_pending(), path=path)
    try_search(campaign, file)
    stages = checked_stages(campaign, path)
    manifest = Manifest(
        run=root.name,
        stages=stages,
        campaign=campaign.to_json(),
        provenance=collect_provenance(stages),
    )
    return create_run(root, manifest, {}, sealed=False)


def campaign_of(run: Run) -> Campaign:
    """The campaign's current settings; RunError for a plain list of items."""
    return settings_of(run.paths, run.manifest)


def resume_campaign(run: Run, campaign: Campaign, *, update: bool, file: str = "campaign") -> None:
    """Check that ``campaign`` equals an existing run's, or update the settings that may change.

    Keys that end the search may change until it is over, other keys of the search until its first
    decision. Raises ConfigError that names the settings that changed.
    """
    stage = run.view.stages[TASKS]
    stage.poll_log()
    decisions = read_decisions(stage.log.segments.values())
    known = as_decided(campaign_of(run), decisions)
    campaign = campaign.with_pending(known.search)
    changed = changed_keys(known.to_json(), campaign.to_json())
    if decisions:
        # What was read from there is in the first decision.
        changed = [key for key in changed if not key.endswith(".from")]
    if not changed:
        return
    message = f"{run.root} was created with other settings: {', '.join(changed)}"
    allowed = tuple(f"search.{key}" for key in BUDGETS) if decisions else ("search.",)
    if stage.log.sealed:
        allowed = ()
    if not all(key.startswith(allowed) for key in changed):
        listed = ", ".join(sorted(f"{key}*" if key.endswith(".") else key for key in allowed))
        hint = f"only {listed} can change now" if allowed else "the search is over"
        raise ConfigError(message, hint=f"{hint}; give --run another directory")
    if not update:
        raise ConfigError(message, hint="--update takes it over")
    if not decisions:
        try_search(campaign, file)
    replace_file(run.paths.campaign, [json.dumps(campaign.to_json(), indent=2).encode()])


class LocalWorkers:
    """Runs local workers and one coordinator until the campaign is complete."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._lives = _LIVES
        self._failed = 0
        self._started_at = 0.0

    def work(
        self, workers: int, options: WorkerOptions, on_tick: Callable[[], None] | None = None
    ) -> int:
        """Work until everything is done; return the exit code of the workers."""

        def tick() -> None:
            if self._watch():
                # Without a coordinator, workers would wait for decisions for ever.
                signal.raise_signal(signal.SIGTERM)
            if on_tick is not None:
                on_tick()

        self._start()
        try:
            code = self._run.work(workers, options, on_tick=tick)
            self._conclude(wait=code == 0)
        finally:
            self._stop()
        return code

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._coordinator = subprocess.Popen(
            [sys.executable, "-Pm", "hpc_toolkit", "campaign", "coordinate", str(self._run.root)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
        )

    def _watch(self) -> bool:
        """Restart the coordinator if it was killed; True, once, if it failed for good."""
        if self._coordinator is None or self._coordinator.poll() is None:
            return False
        code = self._coordinator.returncode
        if time.monotonic() > self._started_at + _LONG_LIFE_S:
            self._lives = _LIVES
        if code < 0 and self._lives > 0:
            self._lives -= 1
            self._start()
        elif code == TRY_AGAIN:
            # The other coordinator may be killed, and then none would decide. If it is not, the one
            # that asked last goes on.
            if time.monotonic() > self._started_at + _RIVAL_S:
                self._start()
        elif code != 0:
            self._coordinator = None
            self._failed = code
            return True
        return False

    def _conclude(self, *, wait: bool) -> None:
        """Wait until the coordinator has published the last table; raise if it failed."""
        while wait and self._coordinator is not None and not self._failed:
            with suppress(subprocess.TimeoutExpired):
                if self._coordinator.wait(timeout=1.0) in (0, TRY_AGAIN):
                    break
            self._watch()
        if self._failed:
            message = f"the coordinator of {self._run.root} ended with exit code {self._failed}"
            raise HpcToolkitError(message, hint="see the error above, fix it and run again")

    def _stop(self) -> None:
        if self._coordinator is not None and self._coordinator.poll() is None:
            self._coordinator.kill()
            self._coordinator.wait()
