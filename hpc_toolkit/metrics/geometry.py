"""Metrics of directions: anisotropy and curvature. Inputs ``(..., n, d)``, results float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.metrics.rows import prepare_rows, require_matrix, row_mask

if TYPE_CHECKING:
    from torch import Tensor

CURVATURE_ROWS = 3
"""Curvature is the angle between two steps, and two steps need three rows."""


def unit_row_sum(z: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum of the rows scaled to unit length ``(..., d)``, and how many are not zero ``(...)``.

    Sums over parts of a data set add up, so `anisotropy` never needs all rows at once.
    """
    rows = prepare_rows(z, lengths, center=False, unit_rows=True)
    return rows.sum(-2), (rows.norm(dim=-1) > 0).sum(-1)


def anisotropy_of_sum(total: Tensor, count: Tensor) -> Tensor:
    """Mean cosine between different rows, from `unit_row_sum`: ``(|sum u|^2 - n) / (n (n - 1))``.

    Raises:
        ValueError: for fewer than two rows that are not zero: there is no pair to compare.
    """
    if int(count.min()) < 2:
        msg = f"anisotropy needs at least 2 rows that are not zero, got {int(count.min())}"
        raise ValueError(msg)
    n = count.double()
    return ((total.square().sum(-1) - n) / (n * (n - 1))).clamp(-1.0, 1.0)


def anisotropy(z: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Mean cosine between different rows of ``z``; zero rows have no direction and are left out.

    Closed form in ``O(n d)``, without the ``n x n`` cosines. Range ``-1/(n-1)`` to 1; 0 for
    orthogonal rows, 1 for rows of one direction. Unchanged by rescaling rows and by rotation.

    Source: Ethayarajh 2019, arXiv 1909.00512 (mean cosine of token representations).

    Raises:
        ValueError: for fewer than two rows that are not zero.
    """
    return anisotropy_of_sum(*unit_row_sum(z, lengths))


def curvature(z: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Mean angle between consecutive *differences* of rows, in radians: 0 (straight) to pi.

    ``v_k = z_{k+1} - z_k`` and the mean of the angles between ``v_k`` and ``v_{k+1}``. This is the
    variant of the paper; some code takes the angle between consecutive rows themselves. A step of
    length zero has no direction, and its angles are left out; with none left the result is 0.
    Unchanged by translation, rotation and scaling.

    Source: Hosseini & Fedorenko 2023, arXiv 2311.04930.

    Raises:
        ValueError: where a sequence has fewer than three rows: it has no angle.
    """
    require_matrix(z, CURVATURE_ROWS)
    if lengths is not None and int(lengths.min()) < CURVATURE_ROWS:
        msg = f"curvature needs sequences of at least 3 rows, got one of {int(lengths.min())}"
        raise ValueError(msg)
    steps = z.double().diff(dim=-2)
    norms = steps.norm(dim=-1, keepdim=True)
    u = steps / norms.clamp_min(2.3e-308)
    a, b = u[..., :-1, :], u[..., 1:, :]
    # arccos of a rounded cosine is NaN beyond 1 and blind near 0 and pi; this form is neither.
    angles = 2 * (a - b).norm(dim=-1).atan2((a + b).norm(dim=-1))
    moved = norms.squeeze(-1) > 0
    valid = moved[..., :-1] & moved[..., 1:] & row_mask(z, lengths).squeeze(-1)[..., 2:]
    mean: Tensor = (angles * valid).sum(-1) / valid.sum(-1).clamp_min(1)
    return mean
