"""Detect when CUDA or the host is out of memory, and let the workload use less."""

from __future__ import annotations

import os
import re
import sys
import traceback
from typing import Any

from hpc_toolkit.errors import PermanentError, describe

TRIES = 8
"""Maximum number of reruns of one item after its workload reduced its memory use."""


_OF_THE_HOST = "DefaultCPUAllocator: "
"""Text in the plain RuntimeError that torch raises when the host is out of memory."""
_OF_A_GPU = re.compile(
    r"\b(?:CUDA|HIP|XPU|MPS)\w*\b.{0,20}\bout of memory"
    r"|\b(?:CU|HIP)[A-Z]+_(?:STATUS_)?ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY"
    r"|out_of_memory: CUDA error|RESOURCE_EXHAUSTED: Out of memory|No executable batch size found",
    re.IGNORECASE,
)
"""First line of errors of torch, CUDA's libraries, RMM, JAX and accelerate, or a line of stderr."""


def resident_bytes() -> int:
    """Memory of this process that is resident (proc(5), statm), in bytes."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_cause = vars(BaseException)["__cause__"].__get__
_members = vars(BaseExceptionGroup)["exceptions"].__get__


def out_of(error: BaseException) -> str:
    """``gpu_oom`` or ``oom``: which memory ran out; "": none did.

    The type or the text of the error says so, or of an error that it was raised from or that is in
    its group. What a workload reports as permanent does not depend on memory.
    """
    left: list[BaseException] = [error]
    seen = set[int]()
    while left:
        if id(one := left.pop()) in seen:
            continue
        seen.add(id(one))
        if found := _own_memory(one):
            return found
        # Attributes of its class may be code of the user that fails.
        if issubclass(type(one), PermanentError):
            return ""
        if issubclass(type(one), BaseExceptionGroup):
            left += _members(one)
        if (cause := _cause(one)) is not None:
            left.append(cause)
    return ""


def _own_memory(error: BaseException) -> str:
    names = {known.__name__ for known in type(error).__mro__}
    if "OutOfMemoryError" in names:  # CuPy's is a MemoryError as well
        return "gpu_oom"
    if names & {"MemoryError", "RuntimeError"}:
        first, _, _ = describe(error).partition("\n")
        if _OF_A_GPU.search(first):
            return "gpu_oom"
        return "oom" if "MemoryError" in names or _OF_THE_HOST in describe(error) else ""
    return ""


def kernel_kills() -> int:
    """How many processes of this node the kernel killed because memory ran out; 0: unknown.

    A control group that has reached its limit counts as well, that of a Slurm job for instance.
    """
    try:
        with open("/proc/vmstat", "rb") as file:
            found = file.read().partition(b"\noom_kill ")[2].split(maxsplit=1)
    except OSError:
        return 0
    return int(found[0]) if found else 0


class Shrinking:
    """Asks one workload to use less memory, a limited number of times for each item."""

    def __init__(self, workload: object) -> None:
        self._on_oom = getattr(workload, "on_oom", None)
        self._index = -1
        self._tries = 0
        self.context: Any = None
        """The context to run the items again with, after :meth:`ask` returned None."""

    def ask(
        self, error: BaseException, context: Any, items: list[dict[str, Any]], index: int
    ) -> BaseException | None:
        """Return the failure to report, or None to run the items again with less memory.

        ``error`` ended the ``items``, which were taken and have no result. ``context`` is None
        while it was being loaded. ``index`` is the position of the first item in the unit run; each
        position has its own tries.
        """
        if index != self._index:
            self._index, self._tries = index, 0
        while self._on_oom is not None and out_of(error) and self._tries < TRIES:
            self._tries += 1
            _free_frames(error)
            try:
                answer = self._on_oom(context, items)
            except BaseException as another:  # noqa: BLE001 - the boundary of the user's code
                error = another
                continue
            if answer is None or answer is False:
                return error
            text = f"hpctk: {describe(error):.200}; again, smaller ({self._tries} of {TRIES})\n"
            sys.stderr.write(text)
            self.context = context if answer is True else answer
            return None
        return error


def _free_frames(error: BaseException) -> None:
    """Clear the local variables of the failed calls, which keep the missing memory in use."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
