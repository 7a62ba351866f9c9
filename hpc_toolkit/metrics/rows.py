"""Rows of a representation matrix: masking, centring and scaling, all in float64.

A matrix is ``(..., n, d)``: ``n`` rows (tokens of a prompt, or pooled prompts) of ``d`` features.
``lengths`` of shape ``(...)`` says how many leading rows are real; the others are padding and are
returned as zeros, which change no Gram eigenvalue other than by adding zeros.
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


def prepare_rows(
    z: Tensor, lengths: Tensor | None = None, *, center: bool, unit_rows: bool
) -> Tensor:
    """Real rows of ``z`` in float64, optionally minus their mean and scaled to unit length.

    A row that is zero, or that centring reduces to rounding noise, becomes exactly zero.
    """
    require_matrix(z)
    mask = row_mask(z, lengths)
    rows = z.double() * mask
    norms = rows.norm(dim=-1, keepdim=True)
    shortest = ZERO_ROW * norms.amax(dim=-2, keepdim=True)
    if center:
        count = mask.sum(-2, keepdim=True).clamp_min(1)
        rows = (rows - rows.sum(-2, keepdim=True) / count) * mask
        norms = rows.norm(dim=-1, keepdim=True)
    scale = 1 / norms.clamp_min(_TINY) if unit_rows else norms * 0 + 1
    prepared: Tensor = rows * (scale * (norms > shortest))
    return prepared


_TINY = 2.3e-308  # the smallest normal float64: divides a zero row without a NaN


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
