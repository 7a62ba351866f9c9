"""Choose the kernel and noise of a Gaussian process by marginal likelihood."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.gp.kernels import Kernel
from hpc_toolkit.bandit.gp.regression import Hyperparameters, cholesky
from hpc_toolkit.bandit.history import first_best

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    _Axis = Callable[[Hyperparameters], list[Hyperparameters]]

LENGTH_SCALES = (0.2, 0.4, 0.8, 1.5, 3.0, 6.0)
"""Candidates for one length scale of all columns, in standard deviations of a feature."""

OWN_LENGTH_SCALES = (*LENGTH_SCALES, math.inf)
"""Candidates for the length scale of a single column; infinity ignores the column."""

NOISES = (1e-4, 1e-3, 1e-2)
"""Candidates for the variance of the noise, in units of the prior's variance."""

SLOPES = (0.01, 0.1, 1.0)
"""Candidates for the prior variance of a slope, if there is a linear mean."""

LIKELIHOOD_DECIMALS = 9
"""Log likelihoods that agree to this many decimals are a tie."""

SWEEPS = 5
"""The most rounds of optimising each column's own length scale."""


def log_marginal_likelihoods(
    x: NDArray[np.float64], y: NDArray[np.float64], tried: Sequence[Hyperparameters]
) -> NDArray[np.float64]:
    """Return log p(y | x) for each of ``tried``; ``x`` has shape (n, d) and ``y`` shape (n,)."""
    kernels = {hyper.kernel: hyper.kernel.between(x, x) for hyper in tried}
    stack = np.array([kernels[hyper.kernel] for hyper in tried])
    factors = _factors(stack, [hyper.noise for hyper in tried])
    white = np.linalg.solve(factors, np.broadcast_to(y[:, None], (len(tried), len(y), 1)))
    diagonals = np.diagonal(factors, axis1=1, axis2=2)
    log_determinants = 2.0 * np.log(diagonals).sum(axis=1)
    squares = (white[:, :, 0] ** 2).sum(axis=1)
    return np.asarray(-0.5 * (squares + log_determinants + len(y) * math.log(2.0 * math.pi)))


def fit(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    *,
    smooth: Sequence[int] | None = None,
    own_scales: bool = False,
    linear: bool = False,
) -> Hyperparameters:
    """Return the hyperparameters with the highest marginal likelihood on a grid.

    Ties go to the first. ``smooth`` are the columns of the Matern part, by default all. The first
    step chooses one length scale for all of them. With ``own_scales``, further steps choose each
    column's own scale, the slope and the noise in turn while the likelihood rises, up to a local
    maximum of the grid. ``linear`` adds a linear mean over all columns. A try takes as long as a
    posterior: 18 tries, or 54 with ``linear``, and with ``own_scales`` up to 5 times (7 per
    column, and 6) more.
    """
    columns = x.shape[1]
    used = range(columns) if smooth is None else smooth
    shared = len(used) == columns and not own_scales
    slopes = SLOPES if linear else (0.0,)
    grid = [
        Hyperparameters(Kernel(scales, slope), noise)
        for scale, slope, noise in product(LENGTH_SCALES, slopes, NOISES)
        for scales in [(scale,) if shared else _scales(scale, used, columns)]
    ]
    best, likelihood = _likeliest(x, y, grid)
    axes = _axes(used, slopes)
    for _ in range(SWEEPS if own_scales else 0):
        before = likelihood
        for axis in axes:
            best, likelihood = _likeliest(x, y, [best, *axis(best)])
        if likelihood <= before:
            break
    return best


def _scales(scale: float, used: Sequence[int], columns: int) -> tuple[float, ...]:
    return tuple(scale if column in used else math.inf for column in range(columns))


def _axes(used: Sequence[int], slopes: Sequence[float]) -> list[_Axis]:
    """Return one function per coordinate of the ascent, from a point to its variants there."""

    def rescaled(column: int, hyper: Hyperparameters) -> list[Hyperparameters]:
        scales = hyper.kernel.length_scales
        before, after = scales[:column], scales[column + 1 :]
        kernels = [
            replace(hyper.kernel, length_scales=(*before, scale, *after))
            for scale in OWN_LENGTH_SCALES
        ]
        return [replace(hyper, kernel=kernel) for kernel in kernels]

    def tilted(hyper: Hyperparameters) -> list[Hyperparameters]:
        return [replace(hyper, kernel=replace(hyper.kernel, slope=slope)) for slope in slopes]

    def blurred(hyper: Hyperparameters) -> list[Hyperparameters]:
        return [replace(hyper, noise=noise) for noise in NOISES]

    return [*(partial(rescaled, column) for column in used), tilted, blurred]


def _factors(stack: NDArray[np.float64], noises: Sequence[float]) -> NDArray[np.float64]:
    """Return the Cholesky factors of kernel matrices plus noise, in the shape of ``stack``."""
    noise = np.array(noises)[:, None, None] * np.eye(stack.shape[1])
    try:
        return np.asarray(np.linalg.cholesky(stack + noise), np.float64)
    except np.linalg.LinAlgError:
        # At least one matrix needs jitter; factor them singly, so that only that one gets it.
        return np.array([cholesky(one, level) for one, level in zip(stack, noises, strict=True)])


def _likeliest(
    x: NDArray[np.float64], y: NDArray[np.float64], tried: Sequence[Hyperparameters]
) -> tuple[Hyperparameters, float]:
    found = np.round(log_marginal_likelihoods(x, y, tried), LIKELIHOOD_DECIMALS)
    best = first_best(found)
    return tried[best], float(found[best])
