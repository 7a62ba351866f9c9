"""Sample the use of CPUs, memory, GPUs and network into a file while ranks run.

``Monitor`` samples from a thread of this process. ``watching`` samples from a child, for a process
that forks. ``read_recordings`` reads the file, and ``summarise`` reduces it to means and maxima.
"""

from hpc_toolkit.training.monitor.recorder import (
    Monitor,
    Recording,
    read_recordings,
    summarise,
    watching,
)

__all__ = ["Monitor", "Recording", "read_recordings", "summarise", "watching"]
