"""Test this process's GPUs with torch; called in a child process, because it may hang."""

from __future__ import annotations

import os
import time
from typing import Any

_SIDE = 256
_MOST_WORDS = 160


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


def be_quiet() -> None:
    """Drop the output of libraries: stdout carries the report."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nothing, fd)


def first_words(error: BaseException) -> str:
    """Return the first line of an error that is not empty, short enough for a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_MOST_WORDS]
