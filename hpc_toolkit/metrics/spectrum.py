"""Metrics of the singular value spectrum: matrix-based entropy, effective rank, RankMe.

All take ``(..., n, d)`` and return float64 of shape ``(...)``. They differ in what they read:
entropy uses the squared singular values, effective rank and RankMe the plain ones, so
``exp(matrix_entropy(z))`` is not ``effective_rank(z)``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from hpc_toolkit.metrics.rows import prepare_rows, require_matrix, row_counts

if TYPE_CHECKING:
    from torch import Tensor

Normalization = Literal["none", "max", "log_n", "log_d", "log_n_log_d"]
"""What an entropy is divided by: nothing, log min(n, d), log n, log d, or log n * log d."""

_EPS = 2.0**-52
_SHANNON = 1e-8  # nearer to order 1 than this, log(sum p^a) / (1 - a) loses more than it gains


def matrix_entropy(
    z: Tensor,
    lengths: Tensor | None = None,
    *,
    alpha: float = 1.0,
    center: bool = False,
    unit_rows: bool = True,
    normalize: Normalization = "none",
) -> Tensor:
    """Renyi entropy of order ``alpha`` of the Gram matrix's eigenvalues, in nats.

    ``K = Z Z^T``, ``p = eig(K) / tr K``, ``S_alpha = log(sum p^alpha) / (1 - alpha)``; order 1 is
    ``-sum p log p`` and order infinity ``-log max p``. Range 0 (all rows on one line) to
    ``log min(n, d)``; ``normalize`` divides, and a divisor of zero (one row) gives 0.
    The published layer metrics use ``center=True, unit_rows=True``. Rows that all vanish after
    these pre-steps (all tokens equal) have entropy 0. Padding given by ``lengths`` has no effect.

    Source: Giraldo, Rao & Principe 2014 (IEEE Trans. Inf. Theory 61); as a layer metric Skean et
    al. 2025, arXiv 2502.02013.

    Raises:
        ValueError: for a negative order, a NaN, an unknown normalisation or an empty matrix.
    """
    if not alpha >= 0:
        msg = f"the order of an entropy is at least 0, got {alpha!r}"
        raise ValueError(msg)
    rows = prepare_rows(z, lengths, center=center, unit_rows=unit_rows)
    p = _shares(_gram_eigenvalues(rows), max(rows.shape[-2:]) * _EPS)
    divisor = _divisor(row_counts(z, lengths), z.shape[-1], normalize)
    entropy = _renyi(p, alpha).clamp_min(0.0)
    return (entropy / divisor.clamp_min(_EPS)) * (divisor > 0)


def effective_rank(z: Tensor, *, center: bool = False) -> Tensor:
    """``exp(-sum p log p)`` with ``p = s / sum s`` over the singular values ``s`` of ``z``.

    Range 1 to ``min(n, d)``; 0 for a zero matrix. Unchanged by scaling and rotating ``z``.
    ``center`` subtracts the mean row first.

    Source: Roy & Vetterli 2007, "The effective rank", EUSIPCO.

    Raises:
        ValueError: for an empty matrix or one that holds NaN.
    """
    p = _shares(_singular_values(z, center=center), 0.0)
    return _renyi(p, 1.0).exp() * (p.sum(-1) > 0)


def rankme(z: Tensor, *, eps: float = 1e-7) -> Tensor:
    """``exp(-sum p log p)`` with ``p = s / sum s + eps``, on uncentred rows.

    Differs from `effective_rank` by ``eps`` alone, which is kept so that values agree with
    published ones. Range 1 to ``min(n, d)``, up to ``eps``; 0 for a zero matrix.

    Source: Garrido et al. 2023, "RankMe", ICML, arXiv 2210.02885.

    Raises:
        ValueError: for an empty matrix or one that holds NaN.
    """
    p = _shares(_singular_values(z, center=False), 0.0)
    shifted = p + eps
    return (-(shifted * shifted.log()).sum(-1)).exp() * (p.sum(-1) > 0)


def _gram_eigenvalues(rows: Tensor) -> Tensor:
    import torch

    n, d = rows.shape[-2:]
    gram = rows @ rows.mT if n <= d else rows.mT @ rows  # the smaller side: same spectrum
    values: Tensor = torch.linalg.eigvalsh(gram)
    return values.clamp_min(0.0)


def _singular_values(z: Tensor, *, center: bool) -> Tensor:
    import torch

    require_matrix(z)
    rows = prepare_rows(z, center=center, unit_rows=False)
    # Not the root of Gram eigenvalues: that would lose half of the digits of the small ones.
    values: Tensor = torch.linalg.svdvals(rows)
    return values


def _shares(values: Tensor, cutoff: float) -> Tensor:
    total = values.sum(-1, keepdim=True)
    p = values / total.clamp_min(2.3e-308)
    return p * (p > cutoff)


def _renyi(p: Tensor, alpha: float) -> Tensor:
    positive = p > 0
    if alpha == math.inf:
        return -p.amax(-1).where(positive.any(-1), positive.any(-1).double() + 1).log()
    if abs(alpha - 1) < _SHANNON:
        return -(p * p.where(positive, p + 1).log()).sum(-1)
    powers = p.where(positive, p + 1).pow(alpha) * positive
    total = powers.sum(-1)
    return total.where(total > 0, total + 1).log() / (1 - alpha)


def _divisor(n: Tensor, d: int, normalize: Normalization) -> Tensor:
    log_n, log_d = n.clamp_min(1).log(), math.log(d)
    divisors = {
        "none": n * 0 + 1,
        "max": log_n.clamp_max(log_d),
        "log_n": log_n,
        "log_d": log_n * 0 + log_d,
        "log_n_log_d": log_n * log_d,
    }
    if normalize not in divisors:
        msg = f"unknown normalisation {normalize!r}; known: {', '.join(divisors)}"
        raise ValueError(msg)
    return divisors[normalize]
