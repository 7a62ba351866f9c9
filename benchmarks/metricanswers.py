"""What the metrics of layers give on known answers, and beside independent code."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpc_toolkit.science import metrics as ours
from tests.unit import metric_references as slow

if TYPE_CHECKING:
    from collections.abc import Iterator

Answer = tuple[str, str, str, float, float]
"""Metric, input, what is expected in words, the same as a number, and what was found."""


def known_answers() -> Iterator[Answer]:
    eye, draws = torch.eye(8), np.random.default_rng(0)
    entropy = ours.matrix_entropy(eye)
    yield "entropy", "8 orthonormal rows", "log 8", math.log(8), float(entropy)
    entropy = ours.matrix_entropy(eye, center=True)
    yield "entropy, centred", "8 orthonormal rows", "log 7", math.log(7), float(entropy)
    line = torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 6.0))
    yield "entropy", "rank 1", "0", 0.0, float(ours.matrix_entropy(line, unit_rows=False))
    yield "effective rank", "8 orthonormal rows", "8", 8.0, float(ours.effective_rank(eye))
    rank = (8 / (1 + 8e-7)) ** (1 + 8e-7)
    yield "RankMe", "8 orthonormal rows", "8, with eps", rank, float(ours.rankme(eye))
    yield "anisotropy", "orthonormal rows", "0", 0.0, float(ours.anisotropy(eye))
    yield "anisotropy", "equal rows", "1", 1.0, float(ours.anisotropy(torch.ones(5, 3)))
    circle = torch.arange(13, dtype=torch.float64) * (math.pi / 6)
    circle = torch.stack([circle.cos(), circle.sin()], -1)
    zigzag = (torch.arange(9) % 2).double()[:, None] * torch.from_numpy(draws.normal(size=(1, 64)))
    yield "curvature", "circle, step pi/6", "pi/6", math.pi / 6, float(ours.curvature(circle))
    yield "curvature", "straight line", "0", 0.0, float(ours.curvature(zigzag.cumsum(0)[1::2]))
    yield "curvature", "zigzag", "pi", math.pi, float(ours.curvature(zigzag))
    opposite = ours.curvature(zigzag - zigzag.mean(0), variant="token-angle")
    yield "token angle", "tokens u, -u, u, ...", "pi", math.pi, float(opposite)
    for exponent in (0.5, 1.0, 2.5):
        planted = slow.with_spectrum(7, 200, np.arange(1, 121) ** (-exponent / 2), centred=True)
        found = float(ours.alpha_req(torch.from_numpy(planted)))
        yield "alpha-ReQ", f"spectrum i^-{exponent:g}", f"{exponent:g}", exponent, found
    apart = torch.eye(6, 20).unsqueeze(1).expand(6, 4, 20)
    yield "LiDAR", "6 orthonormal means, no scatter", "5", 5.0, float(ours.lidar(apart))
    yield "DiME", "orthonormal views", "0", 0.0, float(ours.dime(eye, eye))
    pair = torch.eye(2)[[0, 0, 1]]  # an order that splits it gives entropy log 3
    split = float(ours.dime(pair, pair, permutations=1, seed=0))
    yield "DiME", "one pair of three rows, split", "2/3 log 2", 2 / 3 * math.log(2), split
    loss = math.log1p(14 * math.exp(-10))
    yield (
        "InfoNCE",
        "8 orthonormal rows, equal views",
        "log(1 + 14 e^-10)",
        loss,
        float(ours.infonce(eye, eye)),
    )


def answer_rows() -> list[list[str]]:
    return [
        [metric, what, words, f"{found:.12g}", f"{abs(found - value):.0e}"]
        for metric, what, words, value, found in known_answers()
    ]


def slow_pairs(seed: int) -> Iterator[tuple[str, float, float]]:
    """Ours and the slow reference's values on one random shape."""
    draws = np.random.default_rng([seed])
    n, d, q = (int(draws.integers(low, high)) for low, high in ((4, 40), (2, 40), (2, 6)))
    z, tall = slow.random_rows(seed, n, d), slow.random_rows(seed, n + 8, d + 8)
    views = slow.random_rows(seed, n, 1, d) + 0.3 * slow.random_rows(seed + 1, n, q, d)
    t, v = torch.from_numpy(z), torch.from_numpy(views)
    a, b = v[:, 0], v[:, 1]
    value = slow.entropy(z, center=True, unit_rows=True)
    yield "entropy", float(ours.matrix_entropy(t, center=True)), value
    yield "effective rank", float(ours.effective_rank(t)), slow.rank(z, 0.0)
    yield "RankMe", float(ours.rankme(t)), slow.rank(z, 1e-7)
    yield "anisotropy", float(ours.anisotropy(t)), slow.anisotropy(z)
    for variant in ("difference", "token-angle"):
        yield (
            f"curvature, {variant}",
            float(ours.curvature(t, variant=variant)),
            slow.curvature(z, variant),
        )
    yield "alpha-ReQ", float(ours.alpha_req(torch.from_numpy(tall))), slow.alpha_req(tall, 6, 100)
    yield "LiDAR", float(ours.lidar(v)), slow.lidar(views, 1e-4)
    order = np.random.default_rng([0])
    orders = [order.permutation(n) for _ in range(10)]
    yield "DiME", float(ours.dime(a, b)), slow.dime(views[:, 0], views[:, 1], orders)
    yield "InfoNCE", float(ours.infonce(a, b)), slow.infonce(views[:, 0], views[:, 1], 0.1)


def oracle_pairs(seed: int) -> Iterator[tuple[str, str, float, float]]:
    """Ours and other people's code's values."""
    import scipy.linalg
    import scipy.stats
    import sklearn.decomposition
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.linear_model import LinearRegression
    from sklearn.metrics import pairwise
    from sklearn.preprocessing import normalize

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

    z = slow.random_rows(seed, 300, 110)
    t = torch.from_numpy(z)
    pca = sklearn.decomposition.PCA().fit(z)
    gram = normalize(z - z.mean(0)) @ normalize(z - z.mean(0)).T
    shares = scipy.linalg.eigvalsh(gram).clip(0)
    value = scipy.stats.entropy(shares)
    yield "entropy", "scipy eigvalsh, entropy", float(ours.matrix_entropy(t, center=True)), value
    value = math.exp(scipy.stats.entropy(pca.singular_values_))
    yield "effective rank", "scikit-learn PCA", float(ours.effective_rank(t, center=True)), value
    value = (pairwise.cosine_similarity(z).sum() - 300) / (300 * 299)
    yield "anisotropy", "scikit-learn cosine_similarity", float(ours.anisotropy(t)), value
    steps = np.diff(z, axis=0)
    value = np.arccos(1 - pairwise.paired_cosine_distances(steps[:-1], steps[1:])).mean()
    yield "curvature", "scikit-learn paired_cosine_distances", float(ours.curvature(t)), value
    place = np.arange(6, 101)
    fit = LinearRegression().fit(
        np.log(place)[:, None], np.log(pca.explained_variance_[5:100]), 1 / place
    )
    yield "alpha-ReQ", "scikit-learn PCA, LinearRegression", float(ours.alpha_req(t)), -fit.coef_[0]
    views = slow.random_rows(seed, 9, 7, 6) + 2 * slow.random_rows(seed + 1, 9, 1, 6)
    analysis = LinearDiscriminantAnalysis(solver="eigen").fit(
        views.reshape(63, 6), np.repeat(np.arange(9), 7)
    )
    value = math.exp(scipy.stats.entropy(analysis.explained_variance_ratio_))
    yield (
        "LiDAR, delta 0",
        "scikit-learn LinearDiscriminantAnalysis",
        float(ours.lidar(torch.from_numpy(views), delta=0)),
        value,
    )
    u, v = (
        torch.nn.functional.normalize(t[:, part], dim=-1) for part in (slice(0, 50), slice(50, 100))
    )
    rows = torch.cat([u, v])
    cosines = (rows @ rows.mT / 0.1).fill_diagonal_(-torch.inf)
    value = float(torch.nn.functional.cross_entropy(cosines, torch.arange(600).roll(300)))
    yield "InfoNCE", "torch cross_entropy", float(ours.infonce(u, v)), value


def agreement_rows(shapes: int) -> list[list[str]]:
    worst: dict[tuple[str, str], list[float]] = {}
    for seed in range(shapes):
        for metric, found, value in slow_pairs(seed):
            worst.setdefault((metric, "slow loops"), []).append(
                abs(found - value) / max(1, abs(value))
            )
    for seed in range(max(1, shapes // 20)):
        for metric, code, found, value in oracle_pairs(seed):
            worst.setdefault((metric, code), []).append(abs(found - value) / max(1, abs(value)))
    return [[*key, str(len(errors)), f"{max(errors):.0e}"] for key, errors in worst.items()]
