"""alpha-ReQ: how fast the spectrum of a representation decays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.science.metrics.spectrum import singular_values

if TYPE_CHECKING:
    from torch import Tensor

FIRST, LAST = 6, 100
"""Published range of the fit: numbers of the first and last eigenvalue, from 1, both included."""

_POINTS = 3
_EPS = 2.0**-52


def alpha_req(z: Tensor, *, center: bool = True, first: int = FIRST, last: int = LAST) -> Tensor:
    """Exponent ``a`` of the power law ``lambda_i = c i^-a`` through the middle eigenvalues.

    ``lambda_1 >= lambda_2 >= ...`` are the eigenvalues of the covariance of the rows; ``-a`` is the
    slope of ``log lambda_i`` on ``log i`` for ``first <= i <= last``, by least squares with weights
    ``1 / i``. If there are fewer eigenvalues, the range ends at the numerical rank: singular values
    above ``max(n, d) 2^-52`` of the largest. ``z`` is ``(..., n, d)``, the result ``(...)``.

    Range 0 (equal eigenvalues) upwards; a value of about 1 is said to generalise best. Unchanged by
    scaling and rotation, with ``center`` also by translation. Values of different ranges are not
    comparable, whether ``first`` and ``last`` or the rank cause that. Costs ``n d min(n, d)``.

    Source: Agrawal et al. 2022, "alpha-ReQ", NeurIPS; range and weights are from the authors'
    package reptrix.

    Raises:
        ValueError: fewer than three eigenvalues in the range, or an unusable matrix or range.
    """
    import torch

    if not 1 <= first <= last - _POINTS + 1:
        msg = f"the range of a fit is 1 <= first <= last - {_POINTS - 1}, got {first} to {last}"
        raise ValueError(msg)
    s = singular_values(z, center=center)
    number = torch.arange(1, s.shape[-1] + 1, dtype=s.dtype, device=s.device)
    there = s > s[..., :1] * (max(z.shape[-2:]) * _EPS)
    used = there & (number >= first) & (number <= last)
    counts = used.sum(-1)
    if bool((counts < _POINTS).any()):
        msg = (
            f"alpha-ReQ needs {_POINTS} eigenvalues from number {first} on, got {int(counts.min())}"
        )
        raise ValueError(msg)
    x = number.log()
    # Eigenvalues of the covariance, relative to the largest, so that the logarithms round the same
    # way at every scale of the input.
    y = 2 * (s / s[..., :1]).where(used, s * 0 + 1).log()
    weights = used / number
    x = x - _mean(x, weights)
    slope: Tensor = (weights * x * (y - _mean(y, weights))).sum(-1) / (weights * x * x).sum(-1)
    return (-slope).clamp_min(0.0) + 0.0


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
