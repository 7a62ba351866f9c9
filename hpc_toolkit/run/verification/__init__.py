"""Whether results are whole: every item once, no failure, values where they should be, and the
same again when some are computed anew.
"""

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
