"""Small jobs in place of a large one, of the shape that Slurm would start soonest.

``sbatch --test-only`` answers for one job of each shape. It knows the jobs of others, but neither
the other jobs of the same shape nor the limits of an account that make a job wait.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.planning.nodes import ask_of
from hpc_toolkit.slurm.client import SlurmSilentError
from hpc_toolkit.slurm.controller import sbatch_argv, start_time
from hpc_toolkit.slurm.render.directives import check_number
from hpc_toolkit.submit.submission import Submission, forecast_left, resized
from hpc_toolkit.system.quantities import counted, format_duration, format_walltime
from hpc_toolkit.system.terminal import note, printable

_HALVINGS = 5
"""How often the nodes of a job are halved at most."""
_PARTS = (1, 2, 4)
"""By what the time limit is divided."""
_SHORTEST_S, _ITEMS = 600, 2
"""Shortest time limit, and the number of longest items for which a limit must be enough."""
_SAME_S = 60.0
"""Starts that differ by less are the same."""


class Shape(NamedTuple):
    """Jobs of one size."""

    jobs: int
    nodes: int
    time_s: int

    def __str__(self) -> str:
        each = f"{counted(self.nodes, 'node')} for {format_walltime(self.time_s)}"
        return f"{counted(self.jobs, 'job')} of {each}"


def split(submission: Submission) -> tuple[Submission, int]:
    """Ask Slurm about smaller jobs; return those, and how many have the nodes of the large one.

    Prints the answers on stderr. Of shapes that start at the same time, that with the longest and
    the largest jobs is chosen. Without an answer, the submission stays as it is.
    """
    assert submission.request is not None
    needs = ask_of(*submission.request).needs
    chosen = whole = Shape(1, needs.nodes, needs.time_s)
    starts: dict[Shape, float] = {}
    try:
        for row in _shapes(submission, whole):
            known = len(starts)
            for shape in row:
                starts |= _asked(submission, shape)
            soonest = min(starts.values(), default=math.inf)
            if len(starts) == known or soonest <= time.time() + _SAME_S:
                break
    except SlurmSilentError as error:
        note(f"--split: {error.message}", "warning")
    if starts:
        chosen = next(one for one, at in starts.items() if at < min(starts.values()) + _SAME_S)
    else:
        note("--split: Slurm names no start; the job is sent as it was requested", "warning")
    sys.stderr.write(f"chosen: {chosen}\n")
    submission = submission if chosen == whole else _of_shape(submission, chosen)
    return submission, whole.nodes // chosen.nodes


def _shapes(submission: Submission, whole: Shape) -> Iterator[list[Shape]]:
    """Shapes with the same nodes and time together, in rows of one time limit, largest first."""
    sizes = [whole.nodes // one for one in _divisors(whole.nodes)]
    for part in _PARTS:
        time_s = math.ceil(whole.time_s / part / 60) * 60
        if part == 1 or time_s >= _least_s(submission):
            time_s = whole.time_s if part == 1 else time_s
            yield [Shape(whole.nodes // nodes * part, nodes, time_s) for nodes in sizes]


def _divisors(nodes: int) -> list[int]:
    """By what a number of nodes is divided: about 1, 2, 4, 8 and so on."""
    each = [one for one in range(1, nodes + 1) if nodes % one == 0]
    found = (next((one for one in each if one >= 1 << power), 0) for power in range(_HALVINGS + 1))
    return list(dict.fromkeys(filter(None, found)))


def _least_s(submission: Submission) -> float:
    """The shortest time limit that is enough for every item, as far as durations are known."""
    assert submission.run is not None
    with suppress(HpcToolkitError):
        if (forecaster := forecast_left(submission.run)) is not None:
            return max(_SHORTEST_S, _ITEMS * forecaster.longest_s)
    return math.inf


def _asked(submission: Submission, shape: Shape) -> dict[Shape, float]:
    """When Slurm would start one job of a shape; {} if it does not say. Prints its answer."""
    found: dict[Shape, float] = {}
    try:
        assert submission.request is not None
        check_number(shape.jobs, *submission.request, "--split")
        found[shape] = at = _start(_of_shape(submission, shape))
        left_s = at - time.time()
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
        said = "now" if left_s < _SAME_S else f"in {format_duration(left_s)}, {day}"
    except SlurmSilentError:
        raise
    except (HpcToolkitError, OverflowError, ValueError) as error:
        said = f"no start: {getattr(error, 'message', error)}"
    sys.stderr.write(printable(f"{shape}: {said}") + "\n")
    return found


def _start(submission: Submission) -> float:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "script.sbatch")
        path.write_text(submission.text, encoding="utf-8")
        argv = sbatch_argv(path, submission.arguments, options=submission.options)
        return start_time(argv)


def _of_shape(submission: Submission, shape: Shape) -> Submission:
    found = resized(submission, shape.nodes, shape.time_s)
    return replace(found, copies=shape.jobs)
