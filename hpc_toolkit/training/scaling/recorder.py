"""Record the speed of any training, for ``hpctk scaling``; imports nothing heavy.

::

    recorder = Recorder(batch_per_rank=32, model=model)   # or batch_global=256
    for inputs, labels in loader:
        ...
        recorder.step(loss=loss)
    recorder.finish()
"""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.ranks import host_name
from hpc_toolkit.training.scaling.records import FORMAT, KIND, Record, is_number, write_record

RECORDS = "HPCTK_SCALING_RECORDS"
"""Variable with the file to which a measurement is appended; without it, it is printed."""
REPEAT = "HPCTK_SCALING_REPEAT"
"""Variable with the number of the measurement, from 0."""


class Recorder:
    """Times the steps of a training, and records samples per second at its end.

    Every rank makes one; rank 0 writes. A step lasts from the end of the step before to the call of
    :meth:`step`, on rank 0, after its GPU has finished, with everything in the loop: loading,
    evaluation, checkpoints. The first ``warmup`` steps are not counted.
    """

    def __init__(
        self,
        *,
        batch_per_rank: int | None = None,
        batch_global: int | None = None,
        tokens_per_sample: int = 1,
        warmup: int = 5,
        model: Any = None,
    ) -> None:
        """Give the samples of a step either for each rank or for all ranks together.

        ``model`` is a torch module, to record the numbers of its parameters. Raises
        ConfigError: both batch sizes are given, or neither.
        """
        given = [one for one in (batch_per_rank, batch_global) if one is not None]
        if len(given) != 1 or given[0] < 1:
            message = f"batch_per_rank={batch_per_rank}, batch_global={batch_global}"
            raise ConfigError(message, hint="give one of them, at least 1")
        self._world_size = int(os.environ.get("WORLD_SIZE") or 1)
        self._weak = batch_per_rank is not None
        self._batch = given[0]
        self._tokens = tokens_per_sample
        self._warmup = warmup
        self._parameters: dict[str, int] = {}
        if model is not None:
            counts = [(one.numel(), one.requires_grad) for one in model.parameters()]
            self._parameters = {
                "parameters": sum(count for count, _ in counts),
                "trained_parameters": sum(count for count, trained in counts if trained),
            }
        self._loss: float | None = None
        self._ends: list[float] = []

    def step(self, *, loss: Any = None) -> None:
        """Count a step that has ended; ``loss`` is a number or a tensor with one."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        number = None if loss is None else float(loss)
        self._loss = number if is_number(number) else None
        self._ends.append(time.perf_counter())

    def finish(self) -> Record | None:
        """Write the record on rank 0 and return it; None on other ranks.

        Raises ConfigError: there were no steps after the warm-up.
        """
        if int(os.environ.get("RANK") or 0):
            return None
        counted = self._ends[self._warmup :]
        if len(counted) < 2:
            message = f"{len(self._ends)} steps were recorded, and {self._warmup} are warm-up"
            raise ConfigError(message, hint="train longer, or set warmup to a smaller number")
        times = [after - before for before, after in pairwise(counted)]
        samples = self._batch * self._world_size if self._weak else self._batch
        rate = samples * len(times) / (counted[-1] - counted[0])
        torch = sys.modules.get("torch")
        cuda = torch is not None and torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or self._world_size)
        job = os.environ.get("SLURM_JOB_ID")
        record: Record = {
            "kind": KIND,
            "format": FORMAT,
            "world_size": self._world_size,
            "nodes": max(1, self._world_size // local),
            # Jobs of one world size are repeats, too.
            "repeat": int(os.environ.get(REPEAT) or job or 0),
            "settings": {
                "model": Path(sys.argv[0]).name,
                "arguments": shlex.join(sys.argv[1:]),
                "weak": self._weak,
                "batch_size": self._batch,
            },
            "machine": {
                "host": host_name(),
                "device": torch.cuda.get_device_name() if torch is not None and cuda else "cpu",
                "cpus": len(os.sched_getaffinity(0)),
                "python": platform.python_version(),
                **({"job": job} if job else {}),
            },
            "memory": {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024},
            "at": time.time(),
            "samples_per_s": rate,
            "tokens_per_s": rate * self._tokens,
            "step_s": {
                "median": median(times),
                "p90": quantiles(times, n=10)[-1] if len(times) > 1 else times[0],
            },
            "loss": self._loss,
            **self._parameters,
        }
        path = os.environ.get(RECORDS)
        write_record(record, Path(path) if path else None)
        return record
