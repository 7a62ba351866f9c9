"""Rows that come in parts, kept in a bounded number of rows that stand for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RowStream:
    """Rows ``(n, d)`` in float64: all of them, or at most about ``2 d`` that stand for them.

    Up to ``2 (d + 1)`` rows, or where the ``whole`` of them is wanted, `rows` returns them as they
    came. Of more it returns ``d + 1`` others with the same singular values and the same direction
    of the mean, or without that, the same singular values about it: a metric that reads these alone
    has the value of all rows, to what float64 holds of each row beside the mean. What compares rows
    one by one needs the rows.

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
        """Take rows ``(m, d)``."""
        self._parts.append(rows.double())
        self._waiting += len(rows)
        if not self._whole and self._waiting > 2 * (rows.shape[-1] + 1):
            self._fold()

    def rows(self, *, centred: bool = False) -> Tensor:
        """All rows, or those that stand for them.

        With ``centred``, for what subtracts the mean anyway, those that stand for them have none:
        to add one and take it off again would cost the digits that it is larger than the spread.
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
