"""Metrics of the singular values: matrix-based entropy, effective rank, RankMe, alpha-ReQ.

All take ``(..., n, d)`` and return float64 of shape ``(...)``. Entropy uses the squared singular
values, but effective rank and RankMe use the plain ones, so ``exp(matrix_entropy(z))`` is not
``effective_rank(z)``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from hpc_toolkit.science.metrics.rows import prepare_rows, require_known, row_counts

if TYPE_CHECKING:
    from torch import Tensor

Normalization = Literal["none", "max"]
"""The divisor of an entropy: 1, or its maximum log min(n, d)."""

_EPS = 2.0**-52


def matrix_entropy(
    z: Tensor,
    lengths: Tensor | None = None,
    *,
    center: bool = False,
    unit_rows: bool = True,
    normalize: Normalization = "none",
) -> Tensor:
    """Entropy of the Gram matrix's eigenvalues as shares of their sum, in nats.

    ``K = Z Z^T``, ``p = eig(K) / tr K``, ``S = -sum p log p``: the matrix-based Renyi entropy of
    order 1. Range 0 (all rows on one line) to ``log min(n, d)``; ``normalize="max"`` divides by
    that, and a divisor of zero (one row) gives 0. The published layer metrics use ``center=True,
    unit_rows=True``. If all rows are zero after these steps (all tokens equal), the entropy is 0.
    Padding given by ``lengths`` has no effect. Unchanged by rotation and by scaling ``z``; with
    ``unit_rows`` and without ``center`` also by scaling single rows. Costs
    ``min(n, d)^3 + n d min(n, d)``.

    Source: Giraldo, Rao & Principe 2014 (IEEE Trans. Inf. Theory 61); as a layer metric Skean et
    al. 2025, arXiv 2502.02013.

    Raises ValueError: an unknown normalisation, or an unusable matrix or lengths.
    """
    import torch

    require_known("normalisation", normalize, Normalization)
    rows = prepare_rows(z, lengths, center=center, unit_rows=unit_rows)
    highest = row_counts(z, lengths).clamp_min(1).log().clamp_max(math.log(z.shape[-1]))
    eigenvalues = torch.linalg.eigvalsh(gram(rows)).clamp_min(0.0)
    p = _shares(eigenvalues, max(rows.shape[-2:]) * _EPS)
    entropy = _from_zero(_shannon(p).minimum(highest))
    if normalize == "none":
        return entropy
    return entropy / highest.clamp_min(_EPS) * (highest > 0)


def effective_rank(z: Tensor, *, center: bool = False) -> Tensor:
    """``exp(-sum p log p)`` with ``p = s / sum s`` over the singular values ``s`` of ``z``.

    ``z`` is ``(..., n, d)``, the result ``(...)``. Range 1 to ``min(n, d)``; 0 for a zero matrix.
    Unchanged by scaling and rotating ``z``. ``center`` subtracts the mean row first. Costs
    ``n d min(n, d)``, about ten times as much as an entropy, which needs no singular values.

    Source: Roy & Vetterli 2007, "The effective rank", EUSIPCO.

    Raises ValueError: an empty matrix, or a matrix with NaN or infinite values.
    """
    p = _shares(singular_values(z, center=center), 0.0)
    return _shannon(p).exp().clamp(1.0, p.shape[-1]) * (p.sum(-1) > 0)


def rankme(z: Tensor, *, eps: float = 1e-7) -> Tensor:
    """``exp(-sum p log p)`` with ``p = s / sum s + eps``, on uncentred rows.

    It differs from `effective_rank` only by ``eps``, which makes values agree with published ones.
    ``eps`` raises ranks above 2 a little: the range is ``1 - eps`` to
    ``(k / (1 + k eps))^(1 + k eps)`` with ``k = min(n, d)``, and 0 for a zero matrix. Unchanged by
    scaling and rotating ``z``. ``z`` is ``(..., n, d)``, the result ``(...)``. Costs
    ``n d min(n, d)``.

    Source: Garrido et al. 2023, "RankMe", ICML, arXiv 2210.02885.

    Raises ValueError: an empty matrix, or a matrix with NaN or infinite values.
    """
    p = _shares(singular_values(z, center=False), 0.0)
    shifted = p + eps
    return (-(shifted * shifted.log()).sum(-1)).exp() * (p.sum(-1) > 0)


def entropy_of(eigenvalues: Tensor) -> Tensor:
    """Entropy of eigenvalues ``(..., k)`` as shares of their sum, 0 to ``log k``, in nats.

    Eigenvalues that are negative by rounding count as zero, and so do shares below the rounding
    error of the sum.
    """
    k = eigenvalues.shape[-1]
    p = _shares(eigenvalues.clamp_min(0.0), k * _EPS)
    return _from_zero(_shannon(p).clamp_max(math.log(k)))


def gram(rows: Tensor) -> Tensor:
    """``Z Z^T`` or ``Z^T Z``, whichever is smaller: their spectra are equal apart from zeros."""
    n, d = rows.shape[-2:]
    return rows @ rows.mT if n <= d else rows.mT @ rows


def singular_values(z: Tensor, *, center: bool) -> Tensor:
    """Singular values of ``(..., n, d)``, descending, up to a power of two for each matrix.

    Raises ValueError: an empty matrix, or a matrix with NaN or infinite values.
    """
    import torch

    rows = prepare_rows(z, center=center, unit_rows=False)
    # Roots of Gram eigenvalues would lose half of the digits of the small singular values.
    values: Tensor = torch.linalg.svdvals(rows)
    return values


def _shares(values: Tensor, cutoff: float) -> Tensor:
    total = values.sum(-1, keepdim=True)
    p = values / total.clamp_min(2.3e-308)
    return p * (p > cutoff)


def _shannon(p: Tensor) -> Tensor:
    return -(p * p.where(p > 0, p * 0 + 1).log()).sum(-1)


def _from_zero(entropy: Tensor) -> Tensor:
    return entropy.clamp_min(0.0) + 0.0  # -0.0 becomes 0.0


FIRST, LAST = 6, 100
"""Published range of the fit: numbers of the first and last eigenvalue, from 1, both included."""

_POINTS = 3


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

    Raises ValueError: fewer than three eigenvalues in the range, or an unusable matrix or range.
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
        raise ValueError(
            f"alpha-ReQ needs {_POINTS} eigenvalues from number {first} on, got {int(counts.min())}"
        )
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
