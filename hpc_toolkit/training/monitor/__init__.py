"""What CPUs, memory, GPUs and network do beside ranks, sampled into a file.

``Monitor`` samples from a thread of this process, ``watching`` from a child, for a process that
forks. ``read_recordings`` reads the file back, and ``summarise`` says what of it matters.
"""

from hpc_toolkit.training.monitor.child import watching
from hpc_toolkit.training.monitor.recorder import Monitor
from hpc_toolkit.training.monitor.recordings import Recording, read_recordings, summarise

__all__ = ["Monitor", "Recording", "read_recordings", "summarise", "watching"]
