"""Metrics of singular values (matrix-based entropy, effective rank, RankMe, alpha-ReQ), and of
several views of the same inputs (LiDAR, DiME, InfoNCE).

Metrics of singular values take ``(..., n, d)`` and return float64 of shape ``(...)``. Entropy uses
the squared singular values, but effective rank and RankMe use the plain ones, so
``exp(matrix_entropy(z))`` is not ``effective_rank(z)``. A view is the representation of an
augmented input, such as a text with some characters changed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from hpc_toolkit.science.metrics.rows import (
    prepare_rows,
    real_rows,
    require_known,
    row_counts,
    scaled,
)

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


def alpha_req(z: Tensor) -> Tensor:
    """Exponent ``a`` of the power law ``lambda_i = c i^-a`` through the middle eigenvalues.

    ``lambda_1 >= lambda_2 >= ...`` are the eigenvalues of the covariance of the rows; ``-a`` is the
    slope of ``log lambda_i`` on ``log i`` for ``6 <= i <= 100``, by least squares with weights
    ``1 / i``. If there are fewer eigenvalues, the range ends at the numerical rank: singular values
    above ``max(n, d) 2^-52`` of the largest. ``z`` is ``(..., n, d)``, the result ``(...)``.

    Range 0 (equal eigenvalues) upwards; a value of about 1 is said to generalise best. Unchanged by
    scaling, rotation and translation. Values of fits that end at different ranks are not
    comparable. Costs ``n d min(n, d)``.

    Source: Agrawal et al. 2022, "alpha-ReQ", NeurIPS; range and weights are from the authors'
    package reptrix.

    Raises ValueError: fewer than three eigenvalues in the range, or an unusable matrix.
    """
    import torch

    s = singular_values(z, center=True)
    number = torch.arange(1, s.shape[-1] + 1, dtype=s.dtype, device=s.device)
    there = s > s[..., :1] * (max(z.shape[-2:]) * _EPS)
    used = there & (number >= FIRST) & (number <= LAST)
    counts = used.sum(-1)
    if bool((counts < _POINTS).any()):
        raise ValueError(
            f"alpha-ReQ needs {_POINTS} eigenvalues from number {FIRST} on, got {int(counts.min())}"
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


def lidar(z: Tensor, *, delta: float = 1e-4) -> Tensor:
    """Effective number of directions that separate inputs, relative to their own augmentations.

    ``z`` is ``(..., n, q, d)``: ``q`` views of ``n`` inputs; the result is ``(...)``. ``m_i`` is
    the mean of the views of input i, and ``m`` the mean of all. With
    ``Sb = mean_i (m_i - m)(m_i - m)^T``, ``Sw = mean_ij (z_ij - m_i)(z_ij - m_i)^T + delta I``, and
    ``p`` the eigenvalues of ``Sw^-1/2 Sb Sw^-1/2`` as shares of their sum, the result is
    ``exp(-sum p log p)``; some published code reports its logarithm.

    Range 1 to ``min(n - 1, d)``; 0 if the means of all inputs are equal. Unchanged by rotation,
    translation and the order of inputs and views, but not by scaling: ``delta`` is absolute. If
    ``n (q - 1) < d``, some directions have no scatter except ``delta``, which then decides. Costs
    ``n q d^2 + d^3 + n d min(n, d)``: two products and a Cholesky factor, no root of a matrix.

    Source: Thilak et al. 2023, arXiv 2312.04000, for ``delta`` as well.

    Raises ValueError: fewer than two inputs or views, a negative ``delta``, or a ``delta`` so small
    relative to the scatter that ``Sw`` is singular in float64.
    """
    import torch

    if z.ndim < 3 or z.shape[-3] < 2 or z.shape[-2] < 2:
        raise ValueError(
            f"LiDAR needs at least 2 inputs with at least 2 views each, got shape {tuple(z.shape)}"
        )
    if not 0 <= delta < math.inf:
        raise ValueError(f"delta is at least 0 and finite, got {delta!r}")
    n, q, d = z.shape[-3:]
    rows, exponent = scaled(real_rows(z, fewest=2).reshape(*z.shape[:-3], n * q, d))
    views = rows.reshape(z.shape)
    means = views.mean(-2)
    within = (views - means.unsqueeze(-2)).reshape(rows.shape)
    scatter = within.mT @ within / (n * q)
    # delta in units of the scaled rows. If it is above 1, divide Sw by it against overflow: a
    # factor of Sw does not change the shares. Beyond 2^500, scatter or delta is negligible anyway.
    half = (-exponent).clamp(-500, 500).double().exp2()
    ridge = (delta * half * half)[..., None, None]
    scatter = scatter / ridge.clamp_min(1.0) + ridge.clamp_max(1.0) * torch.eye(
        d, dtype=scatter.dtype, device=scatter.device
    )
    factor, failed = torch.linalg.cholesky_ex(scatter)
    if bool(failed.any()):
        msg = f"the scatter within inputs is singular beside delta = {delta}; take a larger one"
        raise ValueError(msg)
    between = prepare_rows(means, center=True, unit_rows=False)
    whitened = torch.linalg.solve_triangular(factor, between.mT, upper=False)
    # The means are centred, so one direction of inputs is only rounding error.
    eigenvalues = torch.linalg.eigvalsh(gram(whitened.mT))[..., -min(n - 1, d) :]
    rank = entropy_of(eigenvalues).exp().clamp_max(min(n - 1, d))
    return rank * (between.abs().amax((-2, -1)) > 0)


def dime(
    a: Tensor, b: Tensor, *, permutations: int = 10, seed: int = 0, center: bool = False
) -> Tensor:
    """Difference of entropies: how much more two views tell about each other than other inputs do.

    ``mean_P S(K1 o P K2 P^T) - S(K1 o K2)`` with ``o`` the product of entries, ``P`` permutations
    drawn from ``seed``, ``K = U U^T`` the ``n x n`` Gram of the rows scaled to unit length, and
    ``S`` the entropy of `matrix_entropy`. ``a`` is ``(..., n, d1)``, ``b`` is ``(..., n, d2)``, the
    result ``(...)``; ``center`` subtracts each view's mean row first.

    Range ``-s`` to ``s`` with ``s`` the lower of ``S(K1)`` and ``S(K2)``, at most ``log n``; near 0
    for unrelated views. Unchanged by rotating each view and by scaling rows (with ``center``: by
    scaling and translating each view), and up to the draw of ``P`` by reordering inputs. A row
    without a direction has no effect. Costs ``permutations + 1`` times ``n^3``, and ``n^2 d``.

    Source: Skean et al. 2023, arXiv 2301.08164. For ``n > d``, published code of the layer metrics
    uses the ``d x d`` matrices, whose product of entries is meaningless; this function does not.

    Raises ValueError: different shapes, no permutation, an unusable matrix.
    """
    import numpy as np
    import torch

    if a.shape[:-1] != b.shape[:-1]:
        msg = f"two views need the same rows, got shapes {tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(msg)
    if permutations < 1:
        raise ValueError(f"at least 1 permutation is needed, got {permutations}")
    u, v = (prepare_rows(rows, center=center, unit_rows=True) for rows in (a, b))
    first, second = u @ u.mT, v @ v.mT
    draws = np.random.default_rng([seed])
    together = entropy_of(torch.linalg.eigvalsh(first * second))
    apart = together * 0
    for _ in range(permutations):
        order = torch.from_numpy(draws.permutation(a.shape[-2])).to(a.device)
        moved = second[..., order, :][..., order]
        apart = apart + entropy_of(torch.linalg.eigvalsh(first * moved))
    return apart / permutations - together


def infonce(a: Tensor, b: Tensor, *, temperature: float = 0.1, center: bool = False) -> Tensor:
    """Contrastive loss of finding an input's other view among those of all inputs, in nats.

    Low is good. The mean of ``log(e^{s+} + sum e^{s-}) - s+``, where ``s`` is the cosine of two
    rows over ``temperature``, ``s+`` that of the two views of an input, and ``s-`` those of a row
    with all ``2n - 2`` rows of other inputs. ``a`` and ``b`` are ``(..., n, d)``, the result
    ``(...)``; ``center`` subtracts each view's mean row first. Range 0 to
    ``log(1 + m e^{2 / temperature})`` with ``m`` negatives; ``log(1 + m)`` if all rows are equal.
    Unchanged by rotating both, by scaling rows (with ``center``: by scaling and translating each
    view) and by reordering inputs. A row without a direction has cosine 0 with all rows. Costs
    ``n^2 d``, and ``4 n^2`` of memory.

    Source: Chen et al. 2020, arXiv 2002.05709.

    Raises ValueError: different shapes, fewer than two inputs, a temperature that is not positive,
    an unusable matrix.
    """
    import torch

    if a.shape != b.shape:
        msg = f"two views need the same shape, got {tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(msg)
    if a.shape[-2] < 2:
        msg = f"needs at least 2 inputs, got {a.shape[-2]}: there is no other one to tell apart"
        raise ValueError(msg)
    if not 0 < temperature < math.inf:
        raise ValueError(f"a temperature is positive and finite, got {temperature!r}")
    u, v = (prepare_rows(rows, center=center, unit_rows=True) for rows in (a, b))
    positive = (u * v).sum(-1) / temperature
    rows = torch.cat([u, v], dim=-2)
    pairs = rows @ rows.mT / temperature
    pairs.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)  # no row is its own negative
    positive = torch.cat([positive, positive], dim=-1)
    return (pairs.logsumexp(-1) - positive).clamp_min(0.0).mean(-1)
