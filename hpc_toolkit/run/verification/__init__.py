"""Verify results: one row per item, no failures, values in range, and equal when recomputed."""

from hpc_toolkit.run.verification.checks import KINDS, Problem, Range, verify
from hpc_toolkit.run.verification.recomputation import Recomputation
from hpc_toolkit.run.verification.results import Results, plain_key, read_results

__all__ = [
    "KINDS",
    "Problem",
    "Range",
    "Recomputation",
    "Results",
    "plain_key",
    "read_results",
    "verify",
]
