"""The job that brings up a Ray cluster on its nodes and runs a driver program in it."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.slurm.batch.job import JobError
from hpc_toolkit.slurm.client import SUBMIT_S, ask

if TYPE_CHECKING:
    from hpc_toolkit.slurm.batch.job import Job

_PORTS = range(20000, 32000)
"""Below the ports that kernels lend to outgoing connections."""


def ray_words(job: Job, program: tuple[str, ...]) -> tuple[str, ...]:
    """The command of each node's task, with ``os.environ`` ready for Ray.

    ``hpc_toolkit.engines.ray.node`` adds to it what Slurm gave the job of its node, and ends what
    this job has started there: on the first node when the program has ended, on the others when
    the first does not answer any more.

    Raises:
        JobError: there is no Ray, or Slurm does not say where the first node is.
    """
    scripts = Path(sys.executable).parent
    if not os.access(scripts / "ray", os.X_OK):
        msg = f"no ray beside {sys.executable}"
        raise JobError(msg, hint="pip install 'hpc-toolkit[ray]'")
    environ = os.environ
    environ["PATH"] = f"{scripts}:{environ.get('PATH', '')}"
    head = _head(job)
    if len(job.nodes) == 1:
        environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    address = f"{head}:{_port(job, head)}"
    environ["RAY_ADDRESS"] = address
    # A process that reaches Ray can run programs as its user, and the ports of several nodes are
    # open to all users of those nodes.
    environ["RAY_AUTH_MODE"] = "token"
    environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    environ["RAY_USAGE_STATS_ENABLED"] = environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    environ.setdefault("RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT", "120")
    job.log(f"ray at {address}")
    node = (sys.executable, "-m", "hpc_toolkit.engines.ray.node", "ray", "symmetric-run")
    return (*node, "--address", address, "--min-nodes", str(len(job.nodes)), "--", *program)


def _head(job: Job) -> str:
    """The address of the first node, which is not always its name."""
    if len(job.nodes) == 1:
        return "127.0.0.1"
    shown = ask(["scontrol", "show", "node", "--oneliner", job.nodes[0]], timeout_s=SUBMIT_S)
    found = re.search(r" NodeAddr=(\S+)", shown)
    if found is None:
        msg = f"Slurm does not report the address of {job.nodes[0]}"
        raise JobError(msg)
    return found[1]


def _port(job: Job, head: str) -> int:
    """A free port of the first node, a different one after each restart."""
    first = int(os.environ["SLURM_JOB_ID"]) + int(job.restarts)
    for step in range(len(_PORTS)):
        port = _PORTS[(first + step) % len(_PORTS)]
        try:
            socket.create_connection((head, port), timeout=5).close()
        except OSError:
            return port
        job.log(f"port {port} is taken, trying the next one")
    msg = f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on {head}"
    raise JobError(msg)
