"""The launcher ``hydra/launcher=hpctk``; Hydra imports this module whenever an application starts.

Its annotations are not postponed: Hydra executes it before ``sys.modules`` has it, where dataclass
would look for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher


@dataclass
class HpctkLauncherConf:
    """The fields of ``hydra.launcher``, as docs/how-to/hydra.md describes them."""

    _target_: str = "hydra_plugins.hpctk_launcher.HpctkLauncher"
    run: str = "${hydra.sweep.dir}/.hpctk"
    workers: int = 1
    slurm: dict[str, Any] = field(default_factory=dict)
    max_attempts: int = 1
    on_change: str = "rerun"
    fail_sweep: bool = True
    wait: bool = True


ConfigStore.instance().store(
    group="hydra/launcher", name="hpctk", node=HpctkLauncherConf, provider="hpctk"
)


class HpctkLauncher(Launcher):
    """Runs the jobs of a sweep as items of a run directory."""

    def __init__(self, **_: Any) -> None:
        """The fields are read where the sweep begins, with their interpolations."""

    def setup(self, **context: Any) -> None:
        from hpc_toolkit.sweeps import Sweep

        self._sweep: Any = _called(Sweep, **context)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        jobs: Sequence[JobReturn] = _called(self._sweep.launch, job_overrides, initial_job_idx)
        return jobs


def _called(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function; Hydra prints of its own exceptions the text alone."""
    from click import ClickException

    from hpc_toolkit.errors import HpcToolkitError

    try:
        return function(*args, **kwargs)
    except HpcToolkitError as error:
        lines = [error.message, *getattr(error, "__notes__", [])]
        raise CompactHydraException("\n".join(lines)) from error
    except ClickException as error:
        raise CompactHydraException(f"hydra.launcher.slurm: {error.format_message()}") from error
