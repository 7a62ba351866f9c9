"""Rows of a representation matrix: masking, centring and scaling, all in float64.

A matrix is ``(..., n, d)``: ``n`` rows (tokens of a prompt, or pooled prompts) of ``d`` features.
``lengths`` of shape ``(...)`` says how many leading rows are real; the others are padding and are
returned as zeros, which change no Gram eigenvalue other than by adding zeros.

Every metric of this package is free of the scale of its input or says how it depends on it, and
none fails for numbers near the ends of float64: `scaled` brings a matrix to about 1 by a power of
two, which changes no digit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ZERO_ROW = 1e-12
"""A row shorter than this, relative to the longest row, is taken as zero: it is rounding noise,
and scaled to unit length it would become an arbitrary direction."""


def row_mask(z: Tensor, lengths: Tensor | None) -> Tensor:
    """Boolean ``(..., n, 1)``: which rows of ``z`` are real."""
    import torch

    positions = torch.arange(z.shape[-2], device=z.device)
    if lengths is None:
        return torch.ones((*z.shape[:-1], 1), dtype=torch.bool, device=z.device)
    return (positions < lengths.to(z.device).unsqueeze(-1)).unsqueeze(-1)


def row_counts(z: Tensor, lengths: Tensor | None) -> Tensor:
    """Number of real rows of each matrix, float64, shape ``(...)``."""
    return row_mask(z, lengths).squeeze(-1).sum(-1).double()


def masked_mean(z: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Mean of the real rows, float64, shape ``(..., d)``; zeros where there is no real row."""
    total = (z.double() * row_mask(z, lengths)).sum(-2)
    return total / row_counts(z, lengths).clamp_min(1).unsqueeze(-1)


def scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each matrix divided by a power of two, so that its largest entry is in [0.5, 1), and that.

    Squares and sums of the result neither overflow nor vanish, and all digits stay. The exponents
    have shape ``(...)``; a zero matrix stays as it is.
    """
    exponents = rows.abs().amax((-2, -1)).frexp().exponent
    half = exponents // 2  # in two steps, since 2 to the power of 1074 is no float64
    for part in (half, exponents - half):
        rows = rows * (-part).double().exp2()[..., None, None]
    return rows, exponents


def unit(rows: Tensor) -> Tensor:
    """Each row scaled to unit length, however short; zero rows stay zero."""
    largest = rows.abs().amax(-1, keepdim=True)
    rows = rows / largest.where(largest > 0, largest + 1)
    norms = rows.norm(dim=-1, keepdim=True)
    directions: Tensor = rows / norms.where(norms > 0, norms + 1)
    return directions


def angles(a: Tensor, b: Tensor) -> Tensor:
    """Angle of each unit row of ``a`` with that of ``b``: 0 to pi, exact to rounding everywhere.

    The arc cosine of a rounded cosine is NaN beyond 1 and blind near 0 and pi; this form is
    neither. With a zero row there is no angle; the value is then 0 or pi/2 and means nothing.
    """
    halves: Tensor = (a - b).norm(dim=-1).atan2((a + b).norm(dim=-1))
    return 2 * halves


def prepare_rows(
    z: Tensor, lengths: Tensor | None = None, *, center: bool, unit_rows: bool
) -> Tensor:
    """Real rows of ``z`` in float64, optionally minus their mean and scaled to unit length.

    A row that is zero, or that centring reduces to rounding noise, becomes exactly zero. Without
    ``unit_rows`` each matrix comes out times some power of two, see `scaled`.
    """
    require_matrix(z)
    mask = row_mask(z, lengths)
    rows, _ = scaled(z.double() * mask)
    norms = rows.norm(dim=-1, keepdim=True)
    shortest = ZERO_ROW * norms.amax(dim=-2, keepdim=True)
    if center:
        count = mask.sum(-2, keepdim=True).clamp_min(1)
        rows = (rows - rows.sum(-2, keepdim=True) / count) * mask
        norms = rows.norm(dim=-1, keepdim=True)
    rows = rows * (norms > shortest)
    return unit(rows) if unit_rows else rows


def require_matrix(z: Tensor, rows: int = 1) -> None:
    """Refuse what is not a finite matrix of at least ``rows`` rows.

    Raises:
        ValueError: naming the shape, or that a value is NaN or infinite.
    """
    if z.ndim < 2 or z.shape[-2] < rows or z.shape[-1] < 1:
        msg = f"needs a matrix of at least {rows} row(s) and 1 column, got shape {tuple(z.shape)}"
        raise ValueError(msg)
    if not bool(z.isfinite().all()):
        msg = f"matrix of shape {tuple(z.shape)} holds NaN or infinite values"
        raise ValueError(msg)
