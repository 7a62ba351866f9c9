"""Ranks of a run as Ray actors: Ray decides where they are, the run directory what they do.

ray is imported in :mod:`hpc_toolkit.engines.ray.cluster` alone, when the first actor is asked for.
"""
