"""Settings that guides recommend and that slow trainings down, or do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_NCCL = "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TORCH = "pytorch.org/docs/stable/torch_nccl_environment_variables.html"


class _Advice(NamedTuple):
    name: str
    applies: Callable[[str], bool]
    """Whether a value of the variable is harmful."""
    does: str
    instead: str
    source: str


def _is_set(value: str) -> bool:
    return value not in ("", "0")


_ADVICE = (
    _Advice(
        "NCCL_P2P_LEVEL",
        lambda value: value.upper() in ("NVL", "LOC", "0"),
        "GPUs without NVLink, such as L40S and A40, copy through the host",
        "leave it out",
        _NCCL,
    ),
    _Advice(
        "NCCL_P2P_DISABLE", _is_set, "GPUs of a node copy through the host", "leave it out", _NCCL
    ),
    _Advice(
        "NCCL_IB_DISABLE",
        _is_set,
        "nodes exchange data over TCP, although they may have InfiniBand or RoCE",
        "leave it out, or name the interfaces with NCCL_SOCKET_IFNAME and NCCL_IB_HCA",
        _NCCL,
    ),
    _Advice(
        "NCCL_SHM_DISABLE", _is_set, "ranks of a node exchange data over TCP", "leave it out", _NCCL
    ),
    _Advice(
        "NCCL_NET_GDR_LEVEL",
        str.isdecimal,
        "the number is the notation of old versions of NCCL",
        "leave it out, or use the word that the site recommends, such as PHB",
        _NCCL,
    ),
    _Advice(
        "NCCL_TIMEOUT",
        bool,
        "NCCL has no such variable",
        "use init_process_group(timeout=...)",
        _NCCL,
    ),
    _Advice(
        "NCCL_ASYNC_ERROR_HANDLING",
        bool,
        "it is the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "leave it out: a failed collective ends its rank by default",
        _TORCH,
    ),
    _Advice(
        "NCCL_BLOCKING_WAIT",
        bool,
        "it is the old name of TORCH_NCCL_BLOCKING_WAIT",
        "leave it out: a failed collective ends its rank by default",
        _TORCH,
    ),
    _Advice(
        "MASTER_PORT",
        bool,
        "two jobs with this port on one node fail",
        "leave it out: hpctk finds a free port",
        "pytorch.org/docs/stable/elastic/run.html",
    ),
)


def harmful(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that slows trainings down, breaks them, or does nothing.

    It names the value, what it does, what to do instead, and the source.
    """
    for name, applies, does, instead, source in _ADVICE:
        value = environment.get(name, "")
        if applies(value):
            yield f"{name}={value}: {does}; {instead} ({source})"
