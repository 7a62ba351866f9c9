"""Sample the use of CPUs, memory, GPUs and network into a file while ranks run.

``watching`` samples from a child process. ``read_recordings`` reads the file, and ``summarise``
reduces it to means and maxima.
"""

from hpc_toolkit.training.monitor.recorder import (
    Recording,
    read_recordings,
    summarise,
    watching,
)

__all__ = ["Recording", "read_recordings", "summarise", "watching"]
