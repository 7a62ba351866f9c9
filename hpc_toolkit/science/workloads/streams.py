"""Rows that arrive in parts, summarised by a bounded number of equivalent rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RowStream:
    """Rows ``(n, d)`` in float64: all rows, or at most about ``2 d`` equivalent rows.

    Up to ``2 (d + 1)`` rows, or with ``whole``, `rows` returns the rows as they came. Of more rows
    it returns ``d + 1`` substitutes with the same singular values and the same direction of the
    mean, or, centred, the same singular values about the mean. A metric that depends only on these
    has the value of all rows, up to the float64 precision of each row relative to the mean. A
    metric that compares single rows needs ``whole``.

    The sum of squares about the mean is kept as a triangular factor, never multiplied out: squaring
    would lose half of the digits of the small singular values. Updates as in Chan, Golub & LeVeque
    1983, "Algorithms for computing the sample variance".
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._parts: list[Tensor] = []
        self._waiting = 0
        self._count = 0
        self._mean: Tensor | None = None
        self._factor: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add rows ``(m, d)``."""
        self._parts.append(rows.double())
        self._waiting += len(rows)
        if not self._whole and self._waiting > 2 * (rows.shape[-1] + 1):
            self._fold()

    def rows(self, *, centred: bool = False) -> Tensor:
        """Return all rows, or their substitutes.

        With ``centred``, for metrics that subtract the mean anyway, substitutes have mean zero:
        adding a mean that is large relative to the spread and subtracting it would lose digits.
        """
        import torch

        if self._factor is None:
            return torch.cat(self._parts)
        self._fold()
        assert self._mean is not None
        d = len(self._mean)
        spread: Tensor = _across_ones(d).to(self._mean.device) @ self._factor
        if centred:
            return spread
        standing: Tensor = spread + (self._count / (d + 1)) ** 0.5 * self._mean
        return standing

    def _fold(self) -> None:
        import torch

        if not self._parts:
            return
        rows = torch.cat(self._parts)
        self._parts, self._waiting = [], 0
        mean = rows.mean(0)
        about = rows - mean
        total = self._count + len(rows)
        if self._factor is None or self._mean is None:
            self._mean = mean
        else:
            apart = mean - self._mean
            weight = (self._count * len(rows) / total) ** 0.5
            about = torch.cat([self._factor, about, weight * apart.unsqueeze(0)])
            self._mean = self._mean + apart * (len(rows) / total)
        self._factor = torch.linalg.qr(about, mode="r").R
        self._count = total


def _across_ones(d: int) -> Tensor:
    """``(d + 1, d)`` orthonormal columns, each of which sums to zero (Helmert's)."""
    import torch

    k = torch.arange(1, d + 1, dtype=torch.float64)
    below: Tensor = torch.arange(d + 1).unsqueeze(1) < k.long()
    at = torch.arange(d + 1).unsqueeze(1) == k.long()
    columns: Tensor = (below.double() - at.double() * k) / (k * (k + 1)).sqrt()
    return columns
