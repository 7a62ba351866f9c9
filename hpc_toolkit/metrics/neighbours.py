"""Intrinsic dimension from the two nearest neighbours of every row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpc_toolkit.metrics.rows import require_matrix, scaled

if TYPE_CHECKING:
    from torch import Tensor

FEWEST_ROWS = 3
"""A row and its two neighbours."""

_CHUNK = 2**24  # distances that are held at once: 128 MiB
_EQUAL = 1e-12  # a mean log ratio below this is rounding


def two_nn(z: Tensor, *, method: Literal["mle", "linear"] = "mle", discard: float = 0.1) -> Tensor:
    """Intrinsic dimension by TwoNN: how fast the second neighbour recedes behind the first.

    ``mu_i = r2 / r1`` of row i's two smallest distances follows ``F(mu) = 1 - mu^-dimension`` where
    the density is locally constant. Of the ``N`` ratios in ascending order the first
    ``k = int(N (1 - discard))`` are used.

    - ``mle``: ``(k - 1) / (sum_{i<=k} log mu_i + (N - k) log mu_k)``, unbiased, the discarded ones
      counted as not smaller than the last.
    - ``linear``: slope through the origin of ``-log(1 - i/N)`` on ``log mu_i``, as in the paper.

    ``z`` is ``(..., n, d)``, the result ``(...)``. Equal rows count once: they are at distance 0.
    Range 0 upwards; below the true dimension where ``n`` is small for it, by the edges of the data.
    Unchanged by rotation, translation, scaling and by the order of rows. Costs ``n^2 d``; distances
    are sums of squared differences, since near neighbours vanish in ``|a|^2 + |b|^2 - 2 a b``.

    Source: Facco et al. 2017, Scientific Reports 7:12140.

    Raises:
        ValueError: fewer than three different rows, neighbours that are all at equal distances,
            an unknown method, or nothing left to fit.
    """
    import torch

    if method not in ("mle", "linear"):
        msg = f"unknown method {method!r}; known: mle, linear"
        raise ValueError(msg)
    if not 0 <= discard < 1:
        msg = f"the discarded part is at least 0 and below 1, got {discard!r}"
        raise ValueError(msg)
    require_matrix(z, FEWEST_ROWS)
    rows, _ = scaled(z.detach().double())
    each = [_dimension(one, method, discard) for one in rows.reshape(-1, *rows.shape[-2:])]
    return torch.stack(each).reshape(rows.shape[:-2])


def _dimension(rows: Tensor, method: str, discard: float) -> Tensor:
    import torch

    distinct = torch.unique(rows, dim=0)  # -0.0 is 0.0 there
    if len(distinct) < FEWEST_ROWS:
        msg = f"TwoNN needs {FEWEST_ROWS} different rows, got {len(distinct)}"
        raise ValueError(msg)
    near = _two_smallest(distinct)
    near = near[near[:, 0] > 0]  # a difference whose square is no float64 is none
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
    used, part = used[part < 1], part[part < 1]  # the last of all has 1 - F = 0
    return -((-part).log1p() * used).sum() / (used * used).sum()


def _two_smallest(rows: Tensor) -> Tensor:
    """Distances ``(n, 2)`` of each row to its two nearest others."""
    import torch

    step = max(1, _CHUNK // len(rows))
    found = []
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        distances = torch.cdist(part, rows, compute_mode="donot_use_mm_for_euclid_dist")
        own = torch.arange(start, start + len(part), device=rows.device).unsqueeze(-1)
        distances.scatter_(1, own, torch.inf)
        found.append(distances.topk(2, dim=1, largest=False).values)
    return torch.cat(found)
