"""Join or start a Ray cluster, list its nodes, and create actors on it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hpc_toolkit.engines.ray.rank import CONCURRENCY, RankActor
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.system.installation import how_to_add

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.engines.ray.rank import Order
    from hpc_toolkit.engines.ray.settings import RaySettings

_LONGEST_ROOT = 40
"""Paths of sockets are 66 characters longer, and have at most 107 bytes (unix(7))."""
_HOME = "127.0.0.1"
"""The address on which a local Ray listens."""
_ANSWER_S = 5.0
"""Seconds for a connection to a cluster; Ray itself would try for two minutes."""


class RayCluster:
    """A cluster that this process has joined."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    def nodes(self) -> list[dict[str, float]]:
        """Return the resources of each living node, by Ray's names: CPU, GPU, memory in bytes."""
        return [dict(node["Resources"]) for node in self.ray.nodes() if node["Alive"]]

    def actor(self, order: Order, demand: dict[str, float]) -> Any:
        """Request the actor of a rank; it starts when a node has room."""
        kind = self.ray.remote(RankActor).options(
            name=None,
            num_cpus=demand.get("CPU", 0),
            num_gpus=demand.get("GPU", 0),
            memory=demand.get("memory") or None,
            # Not Ray but the driver replaces a dead actor: it counts deaths, and waits between.
            max_restarts=0,
            max_concurrency=CONCURRENCY,
            scheduling_strategy="SPREAD",
        )
        return kind.remote(order.to_json())


@contextmanager
def joined(settings: RaySettings) -> Iterator[RayCluster]:
    """Join the cluster of ``settings``, or start one that ends with this block.

    Raises HpcToolkitError: Ray is not installed, or does not start or answer.
    """
    address = settings.resolve()
    if find_spec("ray") is None:
        message = "--engine ray: Ray is not installed"
        raise ConfigError(message, hint=how_to_add(extra="ray"))
    if address:
        _check_answers(address)
    _quieten(local=not address)
    import ray

    root = "" if address else _make_root()
    try:
        # Ray prints the output of actors, and messages about them; stdout is for data.
        with redirect_stdout(sys.stderr):
            _connect(ray, {"address": address} if address else _local(root), address)
            yield RayCluster(ray)
    finally:
        ray.shutdown()
        if root:
            shutil.rmtree(root, ignore_errors=True)


def _check_answers(address: str) -> None:
    """Raise HpcToolkitError if nothing listens at ``address``."""
    host, _, port = address.rpartition(":")
    place = host.removeprefix("[").removesuffix("]"), int(port)
    try:
        socket.create_connection(place, timeout=_ANSWER_S).close()
    except OSError as error:
        message = f"no Ray cluster answers at {address}: {error.strerror or error}"
        hint = "'ray start --head' printed host and port; may this machine connect there?"
        raise HpcToolkitError(message, hint=hint) from error


def _connect(ray: Any, how: dict[str, Any], address: str) -> None:
    try:
        ray.init(**how, logging_level="ERROR", log_to_driver=True)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        what = f"no Ray cluster answers at {address}" if address else "Ray does not start here"
        reason = str(error).strip().partition("\n")[0][:300]
        hint = "see the output of 'ray start --head'"
        if address:
            hint = "use the same Python, Ray and RAY_AUTH_TOKEN as the cluster"
        message = f"{what}: {reason}"
        raise HpcToolkitError(message, hint=hint) from error


def _local(root: str) -> dict[str, Any]:
    """Return the arguments of ray.init that start a cluster of this machine alone."""
    return {
        "address": "local",
        "num_cpus": len(os.sched_getaffinity(0)),
        "include_dashboard": False,
        "_node_ip_address": _HOME,
        # Ray opens this directory to everybody (mode 0777), but not its parent.
        "_temp_dir": f"{root}/r",
    }


def _make_root() -> str:
    """Create a directory for Ray's sockets and logs that no other user can read."""
    root = tempfile.mkdtemp(prefix="hpctk-ray-")
    if len(root) > _LONGEST_ROOT and os.access("/tmp", os.W_OK):  # noqa: S108 - made privately
        shutil.rmtree(root)
        root = tempfile.mkdtemp(prefix="hpctk-ray-", dir="/tmp")
    return root


def _quieten(*, local: bool) -> None:
    """Set the variables that Ray reads when it is imported or started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would drop lines that several workers print, but each worker's line has its meaning.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if local:
        # A client of Ray can run programs as Ray's user. Ray listens on all interfaces, unless it
        # is limited to this machine; the token keeps other users of this machine out.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray would kill actors for the memory of other processes; a worker watches its own.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        # Ray would replace, for ever, actors whose imports take more than a minute.
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
