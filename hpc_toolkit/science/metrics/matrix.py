"""Metrics of one representation matrix, all in float64: of its rows (anisotropy, curvature) and of
its singular values (matrix-based entropy, effective rank, RankMe, alpha-ReQ).

A matrix is ``(..., n, d)``: ``n`` rows (tokens of a prompt, or pooled prompts) of ``d`` features.
``lengths`` of shape ``(...)``, integers from 1 to ``n``, is the number of leading rows that are
real. The other rows are padding: whatever their values, they count as zeros, which only add zeros
to the eigenvalues of a Gram matrix. Entropy uses the squared singular values, but effective rank
and RankMe use the plain ones, so ``exp(matrix_entropy(z))`` is not ``effective_rank(z)``.

Every metric of this package is independent of the scale of its input, or documents how it depends
on it. No metric fails for numbers near the limits of float64: `scaled` brings a matrix to about 1
by a power of two, which changes no digit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

ZERO_ROW = 1e-12
"""A row shorter than this, relative to the longest row, counts as zero: it is rounding error, and
scaling it to unit length would give an arbitrary direction."""


def row_mask(z: Tensor, lengths: Tensor | None) -> Tensor:
    """Boolean ``(..., n, 1)``: True for the real rows of ``z``."""
    import torch

    if lengths is None:
        return torch.ones((*z.shape[:-1], 1), dtype=torch.bool, device=z.device)
    positions = torch.arange(z.shape[-2], device=z.device)
    return (positions < lengths.to(z.device).unsqueeze(-1)).unsqueeze(-1)


def require_known(what: str, word: str, known: object) -> None:
    """Require one of the words of a Literal type. Raises ValueError."""
    if word not in get_args(known):
        raise ValueError(f"unknown {what} {word!r}; known: {', '.join(get_args(known))}")


def row_counts(z: Tensor, lengths: Tensor | None) -> Tensor:
    """Number of real rows of each matrix, float64, shape ``(...)``."""
    return row_mask(z, lengths).squeeze(-1).sum(-1).double()


def masked_mean(z: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Mean of the real rows, float64, shape ``(..., d)``. Raises ValueError: see `real_rows`."""
    return real_rows(z, lengths).sum(-2) / row_counts(z, lengths).unsqueeze(-1)


def scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each matrix by a power of two that brings it near 1; also return the exponents.

    Fourth powers of the result and their sums neither overflow nor underflow, and no digit changes.
    The exponents have shape ``(...)``. A matrix near 1 or zero is unchanged, with exponent 0.
    """
    exponents = rows.abs().amax((-2, -1)).frexp().exponent
    exponents = exponents * (exponents.abs() > _NEAR)
    if not bool(exponents.any()):
        return rows, exponents
    half = exponents // 2  # in two steps, since 2 to the power of 1074 is not a float64
    for part in (half, exponents - half):
        rows = rows * (-part).double().exp2()[..., None, None]
    return rows, exponents


_NEAR = 100


def _all_near(norms: Tensor) -> bool:
    return bool(((norms > 2.0**-_NEAR) & (norms < 2.0**_NEAR)).all())


def unit_(rows: Tensor) -> Tensor:
    """Scale each row to unit length in place, however short it is; zero rows stay zero."""
    norms = rows.norm(dim=-1, keepdim=True)
    if not _all_near(norms):
        largest = rows.abs().amax(-1, keepdim=True)
        rows = rows.div_(largest.where(largest > 0, largest + 1))
        norms = rows.norm(dim=-1, keepdim=True)
    return rows.div_(norms.where(norms > 0, norms + 1))


def angles(a: Tensor, b: Tensor) -> Tensor:
    """Angle between each unit row of ``a`` and the same row of ``b``: 0 to pi, exact to rounding.

    The arc cosine of a rounded cosine is NaN beyond 1 and imprecise near 0 and pi; this form has
    neither problem. A zero row has no angle; the value is then 0 or pi/2 and meaningless.
    """
    import torch

    buffer = a - b
    apart = buffer.norm(dim=-1)
    together = torch.add(a, b, out=buffer).norm(dim=-1)
    return 2 * torch.atan2(apart, together)


def prepare_rows(
    z: Tensor, lengths: Tensor | None = None, *, center: bool, unit_rows: bool
) -> Tensor:
    """Real rows of ``z`` in float64, optionally minus their mean and scaled to unit length.

    A row that is zero, or that centring reduces to rounding error, becomes exactly zero. Without
    ``unit_rows`` each matrix may be multiplied by a power of two, see `scaled`. Raises ValueError:
    see `real_rows`.
    """
    rows = real_rows(z, lengths)
    mask = row_mask(z, lengths)
    norms = rows.norm(dim=-1, keepdim=True)
    if not _all_near(norms.amax(dim=-2)):  # also if their squares overflowed or underflowed
        rows, _ = scaled(rows)
        norms = rows.norm(dim=-1, keepdim=True)
    shortest = ZERO_ROW * norms.amax(dim=-2, keepdim=True)
    if center:
        mean = rows.sum(-2, keepdim=True) / mask.sum(-2, keepdim=True)
        rows = rows - mean if lengths is None else (rows - mean) * mask
        norms = rows.norm(dim=-1, keepdim=True)
    short = norms <= shortest
    if bool((short & (norms > 0)).any()):
        rows, norms = rows * ~short, norms * ~short
    if not unit_rows:
        return rows
    norms = norms.where(norms > 0, norms + 1)
    # In place if the rows are a copy: allocating memory costs more than the division.
    prepared: Tensor = rows.div_(norms) if center else rows / norms
    return prepared


def real_rows(z: Tensor, lengths: Tensor | None = None, *, fewest: int = 1) -> Tensor:
    """Return ``z`` in float64 and detached, with zeros as padding.

    The result is not a copy if ``z`` is float64 and no lengths are given. Raises ValueError: not a
    matrix of at least ``fewest`` real rows, lengths that do not fit it, complex numbers, or a real
    row with NaN or an infinite value.
    """
    if z.is_complex():
        raise ValueError(f"needs real numbers, got {z.dtype}")
    if z.ndim < 2 or z.shape[-2] < fewest or z.shape[-1] < 1:
        least = f"{fewest} row{'s' * (fewest != 1)}"
        msg = f"needs a matrix of at least {least} and 1 column, got shape {tuple(z.shape)}"
        raise ValueError(msg)
    rows = z.detach().double()
    if lengths is not None:
        _require_lengths(z, lengths, fewest)
        rows = rows.where(row_mask(z, lengths), 0.0)
    # aminmax reads the values once; it returns any NaN or infinite value as an extreme.
    if rows.numel() and not all(bool(end.isfinite()) for end in rows.aminmax()):
        raise ValueError(f"matrix of shape {tuple(z.shape)} holds NaN or infinite values")
    return rows


def _require_lengths(z: Tensor, lengths: Tensor, fewest: int) -> None:
    if lengths.shape != z.shape[:-2] or lengths.is_floating_point():
        msg = (
            f"lengths are integers of shape {tuple(z.shape[:-2])}, one a matrix, "
            f"got {lengths.dtype} of shape {tuple(lengths.shape)}"
        )
        raise ValueError(msg)
    if lengths.numel() == 0:
        return
    low, high = (int(end) for end in lengths.aminmax())
    if low < fewest or high > z.shape[-2]:
        wrong = low if low < fewest else high
        raise ValueError(f"a length is {wrong}, of at least {fewest} and at most {z.shape[-2]}")


CurvatureVariant = Literal["difference", "token-angle"]
"""Two published definitions of curvature: see `curvature`."""


def unit_row_sum(z: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum of the rows scaled to unit length ``(..., d)``, and number of nonzero rows ``(...)``.

    Sums over parts of a data set add up, so anisotropy does not need all rows at once.
    """
    rows = prepare_rows(z, lengths, center=False, unit_rows=True)
    return rows.sum(-2), (rows.norm(dim=-1) > 0).sum(-1)


def anisotropy_of_sum(total: Tensor, count: Tensor) -> Tensor:
    """Mean cosine between different rows, from `unit_row_sum`: ``(|sum u|^2 - n) / (n (n - 1))``.

    Raises ValueError: fewer than two rows are nonzero, so there is no pair to compare.
    """
    if bool((count < 2).any()):
        msg = f"anisotropy needs at least 2 rows that are not zero, got {int(count.min())}"
        raise ValueError(msg)
    n = count.double()
    return ((total.square().sum(-1) - n) / (n * (n - 1))).clamp(-1.0, 1.0)


def anisotropy(z: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Mean cosine between different rows of ``z``; zero rows have no direction and are left out.

    ``(|sum u|^2 - n) / (n (n - 1))`` with the rows ``u`` scaled to unit length: the closed form of
    the mean over all pairs. ``z`` is ``(..., n, d)``, the result ``(...)``. Range ``-1/(n - 1)`` to
    1; 0 for orthogonal rows, 1 for rows of one direction. Unchanged by rescaling rows and by
    rotation. Costs ``n d``; the ``n x n`` cosines are never formed.

    Source: Ethayarajh 2019, arXiv 1909.00512 (mean cosine of token representations).

    Raises ValueError: fewer than two rows are nonzero.
    """
    return anisotropy_of_sum(*unit_row_sum(z, lengths))


def curvature(
    z: Tensor, lengths: Tensor | None = None, *, variant: CurvatureVariant = "difference"
) -> Tensor:
    """Mean angle along a sequence of rows, in radians; ``variant`` defines the angle.

    - ``difference``: between consecutive differences ``v_k = z_{k+1} - z_k`` and ``v_{k+1}``, the
      definition of the paper that introduced it. 0 (straight) to pi. Unchanged by translation,
      rotation and scaling.
    - ``token-angle``: between the consecutive rows themselves, after subtracting their mean: 0 to
      pi. Earlier published code, and tables made with it, use this variant. Two rows always give
      pi.

    ``z`` is ``(..., n, d)``, the result ``(...)``. A step, or centred row, of length zero has no
    direction: its angles are left out of the mean, and with none left the result is 0. Costs
    ``n d``.

    Source: Hosseini & Fedorenko 2023, arXiv 2311.04930, and the code that accompanies Skean et al.
    2025, arXiv 2502.02013, for ``token-angle``. That code takes the arc cosine of a rounded
    product, which is NaN beyond 1; this function does not.

    Raises ValueError: the variant is unknown, or a sequence has no angle because it has fewer than
    three rows (two for ``token-angle``).
    """
    require_known("variant", variant, CurvatureVariant)
    needed = 2 if variant == "token-angle" else 3  # an angle is between two steps, or two rows
    rows = real_rows(z, lengths, fewest=needed)
    mask = row_mask(z, lengths)
    if variant == "token-angle":
        u = prepare_rows(z, lengths, center=True, unit_rows=True)
    else:
        rows, _ = scaled(rows)
        u = unit_(rows.diff(dim=-2))
    turns = angles(u[..., :-1, :], u[..., 1:, :])
    moved = u.norm(dim=-1) > 0.5  # a direction has length 1; without a direction the length is 0
    valid = moved[..., :-1] & moved[..., 1:] & mask.squeeze(-1)[..., needed - 1 :]
    mean: Tensor = (turns * valid).sum(-1) / valid.sum(-1).clamp_min(1)
    return mean.clamp_max(math.pi)


Normalization = Literal["none", "max"]
"""The divisor of an entropy: 1, or its maximum log min(n, d)."""

EPS = 2.0**-52


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
    p = shares(eigenvalues, max(rows.shape[-2:]) * EPS)
    entropy = shannon(p).minimum(highest).clamp_min(0.0) + 0.0  # -0.0 becomes 0.0
    if normalize == "none":
        return entropy
    return entropy / highest.clamp_min(EPS) * (highest > 0)


def effective_rank(z: Tensor, *, center: bool = False) -> Tensor:
    """``exp(-sum p log p)`` with ``p = s / sum s`` over the singular values ``s`` of ``z``.

    ``z`` is ``(..., n, d)``, the result ``(...)``. Range 1 to ``min(n, d)``; 0 for a zero matrix.
    Unchanged by scaling and rotating ``z``. ``center`` subtracts the mean row first. Costs
    ``n d min(n, d)``, about ten times as much as an entropy, which needs no singular values.

    Source: Roy & Vetterli 2007, "The effective rank", EUSIPCO.

    Raises ValueError: an empty matrix, or a matrix with NaN or infinite values.
    """
    p = shares(singular_values(z, center=center), 0.0)
    return shannon(p).exp().clamp(1.0, p.shape[-1]) * (p.sum(-1) > 0)


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
    p = shares(singular_values(z, center=False), 0.0)
    shifted = p + eps
    return (-(shifted * shifted.log()).sum(-1)).exp() * (p.sum(-1) > 0)


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


def shares(values: Tensor, cutoff: float) -> Tensor:
    total = values.sum(-1, keepdim=True)
    p = values / total.clamp_min(2.3e-308)
    return p * (p > cutoff)


def shannon(p: Tensor) -> Tensor:
    return -(p * p.where(p > 0, p * 0 + 1).log()).sum(-1)


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
    there = s > s[..., :1] * (max(z.shape[-2:]) * EPS)
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
