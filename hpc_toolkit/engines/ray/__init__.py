"""Ranks of a run as Ray actors: Ray decides where they run, the run directory what they do.

Only :mod:`hpc_toolkit.engines.ray.engine` imports ray, and only when it joins a cluster.
"""
