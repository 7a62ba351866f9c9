"""Divide the CPUs, memory and GPUs of a node among its workers."""

from hpc_toolkit.system.binding.machine import Machine, read_machine
from hpc_toolkit.system.binding.places import (
    Place,
    Shares,
    bind,
    limit_memory,
    own_place,
    place_workers,
)

__all__ = [
    "Machine",
    "Place",
    "Shares",
    "bind",
    "limit_memory",
    "own_place",
    "place_workers",
    "read_machine",
]
