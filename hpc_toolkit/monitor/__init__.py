"""What CPUs, GPUs and network do beside ranks."""
