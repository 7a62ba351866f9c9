"""Anisotropy and curvature of rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from hpc_toolkit.science.metrics.rows import (
    angles,
    prepare_rows,
    real_rows,
    require_known,
    row_mask,
    scaled,
    unit_,
)

if TYPE_CHECKING:
    from torch import Tensor

CurvatureVariant = Literal["difference", "difference-abs", "token-angle"]
"""Three published definitions of curvature: see `curvature`."""


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
    - ``difference-abs``: the same with ``|cos|``, so that turning back counts as straight: 0 to
      pi/2. Published code uses this variant.
    - ``token-angle``: between the consecutive rows themselves, after subtracting their mean: 0 to
      pi. Earlier published code, and tables made with it, use this variant. Two rows always give
      pi.

    ``z`` is ``(..., n, d)``, the result ``(...)``. A step, or centred row, of length zero has no
    direction: its angles are left out of the mean, and with none left the result is 0. Costs
    ``n d``.

    Source: Hosseini & Fedorenko 2023, arXiv 2311.04930, and the code that accompanies Skean et al.
    2025, arXiv 2502.02013: an early version for ``token-angle``, a late one for
    ``difference-abs``. That code takes the arc cosine of a rounded product, which is NaN beyond 1;
    this function does not.

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
    if variant == "difference-abs":
        turns = turns.minimum(math.pi - turns)
    moved = u.norm(dim=-1) > 0.5  # a direction has length 1; without a direction the length is 0
    valid = moved[..., :-1] & moved[..., 1:] & mask.squeeze(-1)[..., needed - 1 :]
    mean: Tensor = (turns * valid).sum(-1) / valid.sum(-1).clamp_min(1)
    return mean.clamp_max(math.pi / 2 if variant == "difference-abs" else math.pi)
