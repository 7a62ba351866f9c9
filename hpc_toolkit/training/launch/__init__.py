"""Start the ranks of a training script: rendezvous, processes, restarts and exit codes.

Of torch only its key-value store is used: nodes meet there, and so do the ranks of each round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os


def launch(
    script: str,
    *args: object,
    backend: str | None = None,
    start_timeout: float | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> int:
    """Start the ranks of a training script, as ``hpctk launch`` does, and return its exit code.

    Args:
        script: the script's path, or a module's name with ``module=True``.
        args: arguments of the script, each passed as text.
        backend: nccl or gloo; None chooses the one that suits this node.
        start_timeout: seconds to wait for all nodes.
        run_dir: a directory that all nodes share, used for the rendezvous and for logs.
        options: options of torchrun, such as ``nproc_per_node=2``.

    The reason why a rank failed is written to stderr. Signals are forwarded to the ranks if this
    function is called in the main thread.

    Raises HpcToolkitError if the launch cannot start; no rank was started.
    """
    from pathlib import Path

    from hpc_toolkit.errors import ConfigError
    from hpc_toolkit.system.terminal import show_error
    from hpc_toolkit.training.launch import launcher
    from hpc_toolkit.training.launch.plan import START_TIMEOUT_S, Request

    try:
        directory = Path(run_dir).absolute() if run_dir is not None else None
    except TypeError as error:
        msg = f"run_dir: {run_dir!r} is not a path"
        raise ConfigError(msg, hint="such as run_dir='runs/first'") from error
    request = Request(
        script=str(script),
        arguments=tuple(str(argument) for argument in args),
        options={name: value for name, value in options.items() if value is not None},
        backend=backend,
        start_timeout_s=START_TIMEOUT_S if start_timeout is None else start_timeout,
        run_dir=directory,
    )
    outcome = launcher.launch(request)
    if outcome.error is not None:
        show_error(outcome.error)
    return outcome.code
