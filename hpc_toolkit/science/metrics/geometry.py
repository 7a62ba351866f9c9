"""Anisotropy, curvature and intrinsic dimension of rows, and linear CKA of two layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
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


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Linear centred kernel alignment of two representations of the same rows: 0 to 1.

    ``||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F)`` with centred columns, or the same value from the
    ``n x n`` Gram matrices if that is cheaper. ``x`` is ``(..., n, d1)``, ``y`` is
    ``(..., n, d2)``, the result ``(...)``. It is 1 exactly for representations that differ only by
    rotation, scale and translation. Unchanged by swapping the two, and by rotating, scaling and
    translating each.

    This is the plain estimator: with ``n`` below ``d1`` and ``d2``, unrelated representations have
    values far above 0. Costs ``n max(d1, d2)^2``, or ``n^2 max(d1, d2)`` if ``n`` is smaller.

    Source: Kornblith et al. 2019, arXiv 1905.00414.

    Raises ValueError: different numbers of rows, or a representation whose rows are all equal.
    """
    if x.shape[:-1] != y.shape[:-1]:
        msg = f"the two need the same rows, got shapes {tuple(x.shape)} and {tuple(y.shape)}"
        raise ValueError(msg)
    a = prepare_rows(x, center=True, unit_rows=False)
    b = prepare_rows(y, center=True, unit_rows=False)
    for name, rows in (("first", a), ("second", b)):
        if not bool(rows.abs().amax((-2, -1)).gt(0).all()):
            raise ValueError(f"all rows of the {name} representation are equal: it is like nothing")
    n = x.shape[-2]
    if n < max(x.shape[-1], y.shape[-1]):
        k, m = a @ a.mT, b @ b.mT
        cross = (k * m).sum((-2, -1))
    else:
        k, m = a.mT @ a, b.mT @ b
        cross = (b.mT @ a).square().sum((-2, -1))
    norms = [one.square().sum((-2, -1)).sqrt() for one in (k, m)]
    alike: Tensor = cross / (norms[0] * norms[1])
    return alike.clamp(0.0, 1.0)


TwoNNMethod = Literal["mle", "linear"]
"""The fit: see `two_nn`."""

FEWEST_ROWS = 3
"""A row and its two neighbours."""

SAME_ROW = 1e-4
"""Share of the usual distance between neighbours below which rows differ only by rounding: see
`two_nn`."""

_CHUNK = 2**24  # number of distances in memory at once: 128 MiB
_EQUAL = 1e-12  # a mean log ratio below this is rounding error


def two_nn(
    z: Tensor, *, method: TwoNNMethod = "mle", discard: float = 0.1, tolerance: float = SAME_ROW
) -> Tensor:
    """Intrinsic dimension by TwoNN, from the ratio of the distances to the two nearest neighbours.

    If the density is locally constant, the ratio ``mu_i = r2 / r1`` of row i's two smallest
    distances follows ``F(mu) = 1 - mu^-dimension``. Of the ``N`` ratios in ascending order the
    first ``k = int(N (1 - discard))`` are used.

    - ``mle``: ``(k - 1) / (sum_{i<=k} log mu_i + (N - k) log mu_k)``, unbiased; each discarded
      ratio counts as at least ``mu_k``.
    - ``linear``: slope through the origin of ``-log(1 - i/N)`` on ``log mu_i``, as in the paper.

    Rows that are not farther apart than ``tolerance`` times the median of ``r2`` count once. Two
    computations of one input differ in their last bits, and a few pairs of this sort, with ``mu``
    near 1e6, would bring the dimension near 0. Of independent rows in ``D`` dimensions, this drops
    about ``tolerance^D``. If most inputs occur three times or more, ``r2`` itself is rounding error
    and no tolerance helps. With ``tolerance`` 0, only equal rows count once.

    ``z`` is ``(..., n, d)``, the result ``(...)``. Range 0 upwards; if ``n`` is small for the true
    dimension, the edges of the data make the result too low. Unchanged by rotation, translation,
    scaling and the order of rows. Costs ``n^2 d``, or three times that if some rows are near;
    distances are sums of squared differences, since ``|a|^2 + |b|^2 - 2 a b`` loses near neighbours
    to rounding.

    Source: Facco et al. 2017, Scientific Reports 7:12140.

    Raises ValueError: fewer than three different rows, neighbours all at equal distances, an
    unknown method, a ``discard`` or ``tolerance`` outside 0 to 1, or too few ratios left to fit.
    """

    require_known("method", method, TwoNNMethod)
    for name, share in (("discarded part", discard), ("tolerance", tolerance)):
        if not 0 <= share < 1:
            raise ValueError(f"the {name} is at least 0 and below 1, got {share!r}")
    rows, _ = scaled(real_rows(z, fewest=FEWEST_ROWS))
    each = [
        float(_dimension(_neighbours(one, tolerance), method, discard))
        for one in rows.reshape(-1, *rows.shape[-2:])
    ]
    return rows.new_tensor(each).reshape(rows.shape[:-2])


def _neighbours(rows: Tensor, tolerance: float) -> Tensor:
    """Distances ``(n, 2)`` of each distinct row to its two nearest others."""
    import torch

    distinct = torch.unique(rows, dim=0)  # treats -0.0 and 0.0 as equal
    _require_different(distinct)
    near = _two_smallest(distinct)
    # A tolerance of 0 still drops rows whose difference has a square that underflows in float64.
    same = tolerance * near[:, 1].median()
    if not bool((near[:, 0] <= same).any()):
        return near
    distinct = distinct[~_repeated(distinct, same)]
    _require_different(distinct)
    return _two_smallest(distinct)


def _require_different(rows: Tensor) -> None:
    if len(rows) < FEWEST_ROWS:
        raise ValueError(f"TwoNN needs {FEWEST_ROWS} different rows, got {len(rows)}")


def _dimension(near: Tensor, method: str, discard: float) -> Tensor:
    import torch

    logs = (near[:, 1].log() - near[:, 0].log()).sort().values
    total, kept = len(logs), int(len(logs) * (1 - discard))
    if kept < 2:
        raise ValueError(f"TwoNN has {kept} of {total} ratios left to fit, at least 2 are needed")
    used = logs[:kept]
    if float(used.mean()) < _EQUAL:
        raise ValueError("all neighbours are at equal distances: TwoNN sees no dimension")
    if method == "mle":
        return (kept - 1) / (used.sum() + (total - kept) * used[-1])
    part = torch.arange(1, kept + 1, dtype=logs.dtype, device=logs.device) / total
    used, part = used[part < 1], part[part < 1]  # the last ratio of all has 1 - F = 0
    return -((-part).log1p() * used).sum() / (used * used).sum()


def _two_smallest(rows: Tensor) -> Tensor:
    """Distances ``(n, 2)`` of each row to its two nearest others."""
    import torch

    return torch.cat([part.topk(2, largest=False).values for part in _distances(rows)])


def _repeated(rows: Tensor, same: Tensor) -> Tensor:
    """Boolean ``(n,)``: rows that are not farther than ``same`` from an earlier row."""
    import torch

    found, start = [], 0
    for part in _distances(rows):
        found.append((part <= same).tril(start - 1).any(1))
        start += len(part)
    return torch.cat(found)


def _distances(rows: Tensor) -> Iterator[Tensor]:
    """Yield the distances ``(m, n)`` of successive rows to all rows; infinite to themselves."""
    import torch

    step = max(1, _CHUNK // len(rows))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        distances = torch.cdist(part, rows, compute_mode="donot_use_mm_for_euclid_dist")
        own = torch.arange(start, start + len(part), device=rows.device).unsqueeze(-1)
        yield distances.scatter_(1, own, torch.inf)
