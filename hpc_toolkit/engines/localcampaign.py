"""Local campaigns: a campaign's run directory, local workers, and a local coordinator."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.campaign.decisions import read_decisions
from hpc_toolkit.campaign.search import as_decided, try_search
from hpc_toolkit.campaign.settings import TASKS, Campaign, changed_keys, checked_stages, settings_of
from hpc_toolkit.campaign.tables import BUDGETS
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.rundir.layout import Manifest
from hpc_toolkit.system.processes import Supervisor, die_with_parent
from hpc_toolkit.worker.code import collect_provenance

if TYPE_CHECKING:
    from hpc_toolkit.worker.worker import WorkerOptions

_RIVAL_S = 10.0
"""Another coordinator may be killed, and then none would decide. If it is not, the one that looked
last goes on."""
_PAUSE_S = 0.05


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


def resume_campaign(run: Run, campaign: Campaign, *, update: bool, file: str = "campaign") -> None:
    """Check that ``campaign`` equals an existing run's, or update the settings that may change.

    Keys that end the search may change until it is over, other keys of the search until its first
    decision. Raises ConfigError that names the settings that changed.
    """
    stage = run.view.stages[TASKS]
    stage.poll_log()
    decisions = read_decisions(stage.log.segments.values())
    known = as_decided(settings_of(run.paths, run.manifest), decisions)
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


def work_campaign(run: Run, workers: int, options: WorkerOptions) -> int:
    """Run workers and a coordinator until the campaign is complete; the workers' exit code.

    Raises HpcToolkitError: the coordinator failed.
    """
    coordinator = Supervisor(
        [sys.executable, "-Pm", "hpc_toolkit", "campaign", "coordinate", str(run.root)],
        # Without a coordinator, workers would wait for decisions for ever.
        lambda: signal.raise_signal(signal.SIGTERM),
        look_s=_RIVAL_S,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        start_new_session=True,
        preexec_fn=die_with_parent,
    )

    def tick() -> None:
        coordinator.poll(ranks=not coordinator.ended())

    try:
        code = run.work(workers, options, on_tick=tick)
        # Wait until the last table is published, by this coordinator or by another one.
        while code == 0 and coordinator.running:
            time.sleep(_PAUSE_S)
            coordinator.poll(ranks=False)
    finally:
        coordinator.kill()
    if failed := coordinator.ended():
        message = f"the coordinator of {run.root} ended with exit code {failed}"
        raise HpcToolkitError(message, hint="see the error above, fix it and run again")
    return code
