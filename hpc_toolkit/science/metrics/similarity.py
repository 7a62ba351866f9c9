"""Similarity of two layers: linear CKA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.science.metrics.rows import prepare_rows

if TYPE_CHECKING:
    from torch import Tensor


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

    Raises:
        ValueError: different numbers of rows, or a representation whose rows are all equal.
    """
    if x.shape[:-1] != y.shape[:-1]:
        msg = f"the two need the same rows, got shapes {tuple(x.shape)} and {tuple(y.shape)}"
        raise ValueError(msg)
    a = prepare_rows(x, center=True, unit_rows=False)
    b = prepare_rows(y, center=True, unit_rows=False)
    for name, rows in (("first", a), ("second", b)):
        if not bool(rows.abs().amax((-2, -1)).gt(0).all()):
            msg = f"all rows of the {name} representation are equal: it is like nothing"
            raise ValueError(msg)
    n = x.shape[-2]
    if n < max(x.shape[-1], y.shape[-1]):
        k, m = a @ a.mT, b @ b.mT
        cross = (k * m).sum((-2, -1))
    else:
        k, m = a.mT @ a, b.mT @ b
        cross = (b.mT @ a).square().sum((-2, -1))
    alike: Tensor = cross / (_norm(k) * _norm(m))
    return alike.clamp(0.0, 1.0)


def _norm(matrix: Tensor) -> Tensor:
    return matrix.square().sum((-2, -1)).sqrt()
