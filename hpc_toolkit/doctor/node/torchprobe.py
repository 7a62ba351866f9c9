"""Test this process's GPUs with torch; called in a child process, because it may hang."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from pathlib import Path

    from torch._C._distributed_c10d import Store

_SIDE = 256
_MOST_WORDS = 160
NUMBERS = 1 << 24
"""Numbers of 4 bytes that the ranks sum: 64 MiB."""


def look() -> dict[str, Any]:
    """Return torch's version, its GPUs, and whether each multiplies as the CPU does.

    Returns:
        ``torch`` and ``cuda``, versions ("" for a build without GPUs). In a build with GPUs also
        ``error`` if torch cannot use them; otherwise ``gpus``, each with ``name``, ``free`` and
        ``total`` bytes, ``right`` and ``seconds``, or with ``error``.
    """
    be_quiet()
    import torch

    told = {"torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip or ""}
    if not told["cuda"]:
        return told
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return {**told, "error": first_words(error)}
    count = torch.cuda.device_count()
    return {**told, "gpus": [_look_at(index) for index in range(count)]}


def _look_at(index: int) -> dict[str, Any]:
    import torch

    device = torch.device("cuda", index)
    # Integers, so that the result does not depend on the order of summation.
    numbers = torch.arange(_SIDE * _SIDE, dtype=torch.float64).remainder(7).reshape(_SIDE, _SIDE)
    try:
        free, total = torch.cuda.mem_get_info(device)
        began = time.monotonic()
        there = numbers.to(device)
        right = torch.equal((there @ there).cpu(), numbers @ numbers)
        seconds = round(time.monotonic() - began, 3)
    except RuntimeError as error:
        return {"error": first_words(error)}
    name = torch.cuda.get_device_name(device)
    return {"name": name, "free": free, "total": total, "right": right, "seconds": seconds}


def sum_together(
    meeting: Path, *, rank: int, world: int, device: str, address: str, timeout_s: float
) -> dict[str, Any]:
    """Run one rank of two all_reduces; return ``right``, ``seconds`` and ``library``, or ``error``.

    ``seconds`` is the time of the second all_reduce; ``right`` says whether both sums are correct.

    Args:
        meeting: an empty file that all ranks see; the first rank writes its address into it.
        rank: number of this rank.
        world: number of ranks.
        device: ``cuda:N``, for NCCL, or ``cpu``, for Gloo.
        address: the name by which the others reach the first rank's host.
        timeout_s: how long to wait for the others.
    """
    be_quiet()
    from datetime import timedelta

    import torch

    limit = timedelta(seconds=timeout_s)
    try:
        store = _meet(meeting, rank, address, timeout_s)
        backend = "gloo"
        if device != "cpu":
            backend = "nccl"
            torch.cuda.set_device(device)
        torch.distributed.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=limit
        )
        total = world * (world + 1) / 2
        first = torch.full((NUMBERS,), float(rank + 1), device=device)
        second = first.clone()
        torch.distributed.all_reduce(first)
        right = bool((first == total).all())
        # Time the second all_reduce: the first one made the connections.
        began = time.monotonic()
        torch.distributed.all_reduce(second)
        right = bool((second == total).all()) and right
        seconds = time.monotonic() - began
    except (RuntimeError, ValueError, OSError) as error:
        return {"error": first_words(error)}
    return {"right": right, "seconds": seconds, "library": _library(backend)}


def _library(backend: str) -> str:
    """Return the name of the library behind a backend, with NCCL's version."""
    import torch

    if backend == "gloo":
        return "Gloo"
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f"NCCL {'.'.join(map(str, version))}"


def _meet(meeting: Path, rank: int, address: str, timeout_s: float) -> Store:
    """Return the store through which ranks find each other; the first rank serves it."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=timeout_s)
    if rank == 0:
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        files.write_in_place(meeting, json.dumps([address, store.port]).encode() + b"\n")
        return store
    host, port = where_to_meet(meeting, timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


def where_to_meet(meeting: Path, timeout_s: float) -> tuple[str, int]:
    """Read host and port of the first rank, as soon as it has written them.

    Raises:
        TimeoutError: it has not written them in time.
    """
    end = time.monotonic() + timeout_s
    while not (told := files.read_fresh(meeting)).endswith(b"\n"):
        if time.monotonic() > end:
            message = "the first rank did not say where it is"
            raise TimeoutError(message)
        time.sleep(0.05)
    host, port = json.loads(told)
    return host, port


def be_quiet() -> None:
    """Drop the output of libraries, because stdout carries data; NCCL_DEBUG sends it to stderr."""
    if "NCCL_DEBUG" in os.environ:
        os.dup2(2, 1)
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nothing, fd)


def first_words(error: BaseException) -> str:
    """Return the first line of an error that is not empty, short enough for a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_MOST_WORDS]
