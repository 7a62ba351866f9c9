"""Intrinsic dimension from the two nearest neighbours of every row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpc_toolkit.science.metrics.rows import real_rows, require_known, scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

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
    z: Tensor,
    *,
    method: TwoNNMethod = "mle",
    discard: float = 0.1,
    tolerance: float = SAME_ROW,
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
            msg = f"the {name} is at least 0 and below 1, got {share!r}"
            raise ValueError(msg)
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
        msg = f"TwoNN needs {FEWEST_ROWS} different rows, got {len(rows)}"
        raise ValueError(msg)


def _dimension(near: Tensor, method: str, discard: float) -> Tensor:
    import torch

    logs = (near[:, 1].log() - near[:, 0].log()).sort().values
    total, kept = len(logs), int(len(logs) * (1 - discard))
    if kept < 2:
        msg = f"TwoNN has {kept} of {total} ratios left to fit, at least 2 are needed"
        raise ValueError(msg)
    used = logs[:kept]
    if float(used.mean()) < _EQUAL:
        msg = "all neighbours are at equal distances: TwoNN sees no dimension"
        raise ValueError(msg)
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
