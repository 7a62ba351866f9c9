"""Ridge regression on a polynomial of the arms' features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def design(points: NDArray[np.float64], degree: int) -> NDArray[np.float64]:
    """Return shape (n_points, n_terms): 1, the columns, and for degree 2 squares and products.

    Every term except the first has mean 0 and standard deviation 1 over the points; terms that are
    constant over the points are left out.
    """
    terms = list(points.T)
    if degree > 1:
        first, second = np.triu_indices(points.shape[1])
        terms += [points[:, i] * points[:, j] for i, j in zip(first, second, strict=True)]
    kept = [np.ones(len(points))]
    for term in terms:
        centred = term - term.mean()
        deviation = centred.std()
        if deviation > 1e-12:
            kept.append(centred / deviation)
    return np.array(kept).T


class Ridge:
    """Posterior of a parameter vector by ridge regression: N(theta, A^-1) in units of the noise.

    A = ridge I + X' X and theta = A^-1 X' y, by Cholesky factors of A (d x d, d a few dozen).
    """

    def __init__(self, x: NDArray[np.float64], y: NDArray[np.float64], ridge: float) -> None:
        self._precision = ridge * np.eye(x.shape[1]) + x.T @ x
        self._factor = np.linalg.cholesky(self._precision)
        self.theta: NDArray[np.float64] = np.linalg.solve(
            self._factor.T, np.linalg.solve(self._factor, x.T @ y)
        )

    def sd(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return shape (n_points,): sqrt(x' A^-1 x)."""
        white = np.linalg.solve(self._factor, points.T)
        return np.asarray(np.sqrt((white**2).sum(axis=0)))

    def believe(self, point: NDArray[np.float64]) -> None:
        """Condition on observing ``point`` at its prediction, which leaves theta unchanged."""
        self._precision = self._precision + np.outer(point, point)
        self._factor = np.linalg.cholesky(self._precision)

    def draw(self, width: float, generator: np.random.Generator) -> NDArray[np.float64]:
        """Draw a parameter vector from N(theta, width^2 A^-1)."""
        normals = generator.standard_normal(len(self.theta))
        return np.asarray(self.theta + width * np.linalg.solve(self._factor.T, normals))
