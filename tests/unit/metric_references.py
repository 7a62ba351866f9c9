"""The metrics once more, slowly: float64, one row, pair or outer product at a time, as defined.

Written from the definitions in the docstrings, with loops where the package has matrix products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def random_rows(seed: int, *shape: int) -> Array:
    """Normal numbers with columns of different lengths, so that no spectrum is flat."""
    scales = np.linspace(0.2, 2.0, shape[-1])
    return np.random.default_rng(seed).normal(size=shape) * scales


def rotation(seed: int, d: int) -> Array:
    """A random orthogonal matrix."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))
    return np.asarray(q)


def with_spectrum(seed: int, n: int, values: Any, *, centred: bool) -> Array:
    """Rows ``(n, len(values))`` with these singular values; if ``centred``, about the origin."""
    raw = np.random.default_rng(seed).normal(size=(n, len(values)))
    left, _ = np.linalg.qr(raw - raw.mean(axis=0) * centred)
    return np.asarray(left * values @ rotation(seed + 1, len(values)).T)


def shannon(values: Iterable[float]) -> float:
    """Entropy of numbers as shares of their sum."""
    kept = [value for value in values if value > 0]
    total = math.fsum(kept)
    return -math.fsum(value / total * math.log(value / total) for value in kept)


def entropy(z: Array, *, center: bool, unit_rows: bool) -> float:
    if center:
        z = z - z.mean(axis=0)
    if unit_rows:
        z = np.array([row / math.sqrt(math.fsum(x * x for x in row)) for row in z])
    eigenvalues = np.linalg.svd(z, compute_uv=False) ** 2
    return shannon(float(x) for x in eigenvalues if x > 1e-13 * eigenvalues.sum())


def rank(z: Array, eps: float) -> float:
    s = np.linalg.svd(z, compute_uv=False)
    p = s / s.sum() + eps
    return math.exp(-math.fsum(float(x) * math.log(x) for x in p if x > 0))


def anisotropy(z: Array) -> float:
    u = [row / np.linalg.norm(row) for row in z]
    return float(np.mean([a @ b for i, a in enumerate(u) for j, b in enumerate(u) if i != j]))


def _angle(a: Array, b: Array) -> float:
    cosine = float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
    return math.acos(min(1.0, max(-1.0, cosine)))


def curvature(z: Array, variant: str) -> float:
    if variant == "token-angle":
        centred = z - z.mean(axis=0)
        return float(np.mean([_angle(a, b) for a, b in itertools.pairwise(centred)]))
    steps = [b - a for a, b in itertools.pairwise(z)]
    return float(np.mean([_angle(a, b) for a, b in itertools.pairwise(steps)]))


def alpha_req(z: Array, first: int, last: int) -> float:
    """By the normal equations of the weighted fit."""
    centred = z - z.mean(axis=0)
    eigenvalues = sorted(np.linalg.svd(centred, compute_uv=False) ** 2 / len(z), reverse=True)
    sums = np.zeros((2, 2))
    right = np.zeros(2)
    for i, value in enumerate(eigenvalues, start=1):
        if first <= i <= last and value > 1e-20 * eigenvalues[0]:
            row = np.array([math.log(i), 1.0])
            sums += np.outer(row, row) / i
            right += row * math.log(value) / i
    return -float(np.linalg.solve(sums, right)[0])


def lidar(z: Array, delta: float) -> float:
    """By outer products and a root of the scatter within inputs."""
    n, q, d = z.shape
    means = z.mean(axis=1)
    between, within = np.zeros((d, d)), np.zeros((d, d))
    for i in range(n):
        between += np.outer(means[i] - means.mean(axis=0), means[i] - means.mean(axis=0)) / n
        for j in range(q):
            within += np.outer(z[i, j] - means[i], z[i, j] - means[i]) / (n * q)
    values, vectors = np.linalg.eigh(within + delta * np.eye(d))
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    eigenvalues = np.linalg.eigvalsh(root @ between @ root)
    return math.exp(shannon(eigenvalues[eigenvalues > 1e-12 * eigenvalues.max()]))


def dime(a: Array, b: Array, orders: Iterable[Any]) -> float:
    def cosines(rows: Array) -> Array:
        u = [row / np.linalg.norm(row) for row in rows]
        return np.array([[x @ y for y in u] for x in u])

    def joint(first: Array, second: Array) -> float:
        eigenvalues = np.linalg.eigvalsh(first * second)
        return shannon(eigenvalues[eigenvalues > 1e-14 * len(first)])

    k1, k2 = cosines(a), cosines(b)
    apart = []
    for order in orders:
        matrix = np.zeros_like(k2)
        matrix[np.arange(len(order)), order] = 1.0
        apart.append(joint(k1, matrix @ k2 @ matrix.T))
    return float(np.mean(apart)) - joint(k1, k2)


def infonce(a: Array, b: Array, temperature: float) -> float:
    u, v = ([row / np.linalg.norm(row) for row in rows] for rows in (a, b))
    losses = []
    for first, second in ((u, v), (v, u)):
        for i, row in enumerate(first):
            positive = math.exp(row @ second[i] / temperature)
            others = [other for j, other in enumerate(second) if j != i]
            others += [other for j, other in enumerate(first) if j != i]
            negative = math.fsum(math.exp(row @ other / temperature) for other in others)
            losses.append(-math.log(positive / (positive + negative)))
    return float(np.mean(losses))
