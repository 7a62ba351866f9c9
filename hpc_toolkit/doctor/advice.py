"""Settings that guides recommend and that slow trainings down, or do nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NCCL = "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TORCH = "pytorch.org/docs/stable/torch_nccl_environment_variables.html"
_SET, _ANY = "(?!0$).+", ".+"
_BY_DEFAULT = "leave it out: a failed collective ends its rank by default"

# Variable: a pattern of its harmful values, what they do, what to do instead, and the source.
_ADVICE = {
    "NCCL_P2P_LEVEL": (
        "(?i:NVL|LOC|0)",
        "GPUs without NVLink, such as L40S and A40, copy through the host",
        "leave it out",
        _NCCL,
    ),
    "NCCL_P2P_DISABLE": (_SET, "GPUs of a node copy through the host", "leave it out", _NCCL),
    "NCCL_IB_DISABLE": (
        _SET,
        "nodes exchange data over TCP, although they may have InfiniBand or RoCE",
        "leave it out, or name the interfaces with NCCL_SOCKET_IFNAME and NCCL_IB_HCA",
        _NCCL,
    ),
    "NCCL_SHM_DISABLE": (_SET, "ranks of a node exchange data over TCP", "leave it out", _NCCL),
    "NCCL_NET_GDR_LEVEL": (
        "[0-9]+",
        "the number is the notation of old versions of NCCL",
        "leave it out, or use the word that the site recommends, such as PHB",
        _NCCL,
    ),
    "NCCL_TIMEOUT": (
        _ANY,
        "NCCL has no such variable",
        "use init_process_group(timeout=...)",
        _NCCL,
    ),
    "NCCL_ASYNC_ERROR_HANDLING": (
        _ANY,
        "it is the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _BY_DEFAULT,
        _TORCH,
    ),
    "NCCL_BLOCKING_WAIT": (
        _ANY,
        "it is the old name of TORCH_NCCL_BLOCKING_WAIT",
        _BY_DEFAULT,
        _TORCH,
    ),
    "MASTER_PORT": (
        _ANY,
        "two jobs with this port on one node fail",
        "leave it out: hpctk finds a free port",
        "pytorch.org/docs/stable/elastic/run.html",
    ),
}


def harmful(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that slows trainings down, breaks them, or does nothing.

    It names the value, what it does, what to do instead, and the source.
    """
    for name, (values, does, instead, source) in _ADVICE.items():
        value = environment.get(name, "")
        if re.fullmatch(values, value, re.DOTALL):
            yield f"{name}={value}: {does}; {instead} ({source})"
