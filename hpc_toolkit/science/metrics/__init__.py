"""Representation metrics: tensors in, float64 numbers out, without any I/O.

Importing this package does not load torch; computing with it does. All functions take any real
dtype on any device, compute in float64 on that device, and treat leading dimensions as a batch. If
a value cannot be computed, they raise ValueError with the reason; no result is NaN or infinite.
Gradients do not flow through. This module has the metrics that compare several views of the same
inputs; a view is the representation of an augmented input, such as a text with some characters
changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from hpc_toolkit.science.metrics.matrix import (
    EPS,
    alpha_req,
    anisotropy,
    curvature,
    effective_rank,
    gram,
    masked_mean,
    matrix_entropy,
    prepare_rows,
    rankme,
    real_rows,
    scaled,
    shannon,
    shares,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "METRICS",
    "STANDARD",
    "Metric",
    "alpha_req",
    "anisotropy",
    "curvature",
    "dime",
    "effective_rank",
    "infonce",
    "lidar",
    "masked_mean",
    "matrix_entropy",
    "rankme",
]


def entropy_of(eigenvalues: Tensor) -> Tensor:
    """Entropy of eigenvalues ``(..., k)`` as shares of their sum, 0 to ``log k``, in nats.

    Eigenvalues that are negative by rounding count as zero, and so do shares below the rounding
    error of the sum.
    """
    k = eigenvalues.shape[-1]
    p = shares(eigenvalues.clamp_min(0.0), k * EPS)
    return shannon(p).clamp_max(math.log(k)).clamp_min(0.0) + 0.0


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


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that gives one number for one layer."""

    scope: Literal["prompt", "tokens", "dataset", "views"]
    """The input of the function. ``prompt``: the tokens of each prompt; the values are then
    averaged over prompts. ``tokens``: the tokens of all prompts together. ``dataset``: one mean row
    per prompt. ``views``: one mean row for each of several augmentations of every prompt."""
    function: Callable[..., Tensor]
    """``(z, lengths)`` for ``prompt`` and ``tokens``, ``(z)`` for ``dataset``, ``(z)`` of shape
    ``(views, prompts, features)`` for ``views``."""
    about: str
    """One line with the definition, the chosen options and the range."""
    fewest: int = 1
    """Least number of rows: tokens of every prompt for ``prompt``, else different prompts."""


def _of_first_two(metric: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: metric(z[..., 0, :, :], z[..., 1, :, :], center=True)


_layer_entropy = partial(matrix_entropy, center=True, unit_rows=True, normalize="max")

METRICS: dict[str, Metric] = {
    "prompt_entropy": Metric(
        "prompt",
        _layer_entropy,
        "matrix-based entropy of a prompt's tokens (centred, unit rows) / log min(n, d): 0..1",
    ),
    "dataset_entropy": Metric(
        "dataset",
        _layer_entropy,
        "matrix-based entropy of the prompt means (centred, unit rows) / log min(n, d): 0..1",
    ),
    "effective_rank": Metric(
        "dataset",
        partial(effective_rank, center=True),
        "effective rank of the centred prompt means: 1..min(n, d)",
    ),
    "rankme": Metric("dataset", rankme, "RankMe of the uncentred prompt means: 1..min(n, d)"),
    "anisotropy": Metric(
        "tokens", anisotropy, "mean cosine between all tokens of all prompts: -1/(n - 1)..1"
    ),
    "curvature": Metric(
        "prompt",
        curvature,
        "mean angle between consecutive token differences, radians: 0..pi",
        fewest=3,
    ),
    "token_angle": Metric(
        "prompt",
        partial(curvature, variant="token-angle"),
        "mean angle between consecutive centred tokens, radians: 0..pi",
        fewest=2,
    ),
    "alpha_req": Metric(
        "dataset",
        alpha_req,
        "decay of the prompt means' covariance eigenvalues 6 to 100, log-log slope: 0 upwards",
        fewest=9,
    ),
    "lidar": Metric(
        "views",
        lambda z: lidar(z.movedim(-3, -2)),
        "LiDAR of the views' means, delta 1e-4, as a rank: 1..min(n - 1, d)",
        fewest=2,
    ),
    "dime": Metric(
        "views",
        _of_first_two(dime),
        "DiME of the first two views (centred, order 1): -log n..log n",
    ),
    "infonce": Metric(
        "views",
        _of_first_two(infonce),
        "SimCLR loss of the first two views (centred, temperature 0.1), low is good: 0 upwards",
        fewest=2,
    ),
}
"""Every metric, by its name in results and tables."""

STANDARD = (
    "prompt_entropy",
    "dataset_entropy",
    "effective_rank",
    "rankme",
    "anisotropy",
    "curvature",
)
"""The default metrics: one forward pass over the prompts is enough for all of them, and they are
defined for any two prompts."""
