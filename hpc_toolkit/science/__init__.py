"""Models and texts: metrics and workloads."""
