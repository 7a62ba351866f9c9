"""Kernels: the covariance of the reward between points of feature space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def matern52(
    left: NDArray[np.float64], right: NDArray[np.float64], length_scale: float
) -> NDArray[np.float64]:
    """Return the kernel matrix of shape (len(left), len(right)); equal points have covariance 1."""
    square = np.zeros((len(left), len(right)))
    # Column by column: the expansion |a|^2 + |b|^2 - 2ab loses precision for close points.
    for one, other in zip(left.T, right.T, strict=True):
        square += (one[:, None] - other[None, :]) ** 2
    scaled = np.sqrt(5.0 * square) / length_scale
    return np.asarray((1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Matern-5/2 kernel of variance 1, plus the kernel of a linear function of unknown slopes:

        k(a, b) = m(|(a - b) / length_scales|) + slope * sum_j a_j b_j

    with m(r) = (1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r). The second part is a linear mean whose
    slopes have a normal prior of variance ``slope`` (Rasmussen and Williams 2006, section 2.7).
    This is a ridge regression whose uncertainty is part of the posterior.
    """

    length_scales: tuple[float, ...]
    """In standard deviations of a feature: one for all columns, or one for each, which lets less
    relevant features have longer scales (automatic relevance determination). Infinite: the column
    is left out."""

    slope: float = 0.0
    """Prior variance of the slope of every column; 0 leaves the linear part out."""

    def between(self, left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return shape (len(left), len(right)), for points of shape (n, n_columns)."""
        if len(self.length_scales) == 1:
            covariance = matern52(left, right, self.length_scales[0])
        else:
            scales = np.array(self.length_scales)
            covariance = matern52(left / scales, right / scales, 1.0)
        return covariance + self.slope * (left @ right.T) if self.slope else covariance

    def variances(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return shape (len(points),): ``k(a, a)``."""
        ones = np.ones(len(points))
        return ones + self.slope * (points**2).sum(axis=1) if self.slope else ones
