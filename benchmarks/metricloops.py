"""The metrics the way published code computes them: layer by layer, in Python loops.

One prompt, token, outer product or pair of views at a time, with the pre-steps of that code, and
without its faults where these change the number: entries of a Gram are not cut off at zero, cosines
are, the product of Grams is that of samples, and all is float64. So its speed is measured, and the
values can be compared.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def normalized(rows: Tensor) -> Tensor:
    """Rows minus their mean, to unit length."""
    rows = rows - rows.mean(0)
    unit: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return unit


def spectral_entropy(gram: Tensor) -> float:
    values, _ = torch.linalg.eigh(gram)
    p = values[values > 1e-14 * values.sum()]
    p = p / p.sum()
    return float(-(p * p.log()).sum())


def prompt_entropy(prompts: Tensor) -> float:
    total = 0.0
    for tokens in prompts:
        total += dataset_entropy(tokens)
    return total / len(prompts)


def dataset_entropy(rows: Tensor) -> float:
    rows = normalized(rows)
    n, d = rows.shape
    gram = rows.T @ rows if n > d else rows @ rows.T
    return spectral_entropy(gram / gram.trace()) / math.log(min(n, d))


def curvature(prompts: Tensor) -> float:
    total = 0.0
    for tokens in prompts:
        turns = []
        for k in range(1, len(tokens) - 1):
            before, after = tokens[k] - tokens[k - 1], tokens[k + 1] - tokens[k]
            cosine = (before @ after) / (before.norm() * after.norm())
            turns.append(torch.arccos(cosine.clamp(-1, 1)).item())
        total += sum(turns) / len(turns)
    return total / len(prompts)


def token_angle(prompts: Tensor) -> float:
    total = 0.0
    for tokens in prompts:
        rows = normalized(tokens)
        turns = [
            torch.arccos((rows[i] @ rows[i + 1]).clamp(-1, 1)).item() for i in range(len(rows) - 1)
        ]
        total += sum(turns) / len(turns)
    return total / len(prompts)


def rankme(rows: Tensor) -> float:
    s = torch.linalg.svd(rows).S
    p = s / s.sum() + 1e-7
    return float((-(p * p.log()).sum()).exp())


def effective_rank(rows: Tensor) -> float:
    s = torch.linalg.svd(rows - rows.mean(0)).S
    p = s / s.sum()
    p = p[p > 0]
    return float((-(p * p.log()).sum()).exp())


def anisotropy(prompts: Tensor) -> float:
    """By all pairs of tokens, a thousand rows of cosines at a time."""
    rows = torch.cat(list(prompts))
    rows = rows / rows.norm(dim=1, keepdim=True)
    total = 0.0
    for part in rows.split(1000):
        total += float((part @ rows.T).sum())
    return (total - len(rows)) / (len(rows) * (len(rows) - 1))


def alpha_req(rows: Tensor) -> float:
    values, _ = torch.linalg.eigh(torch.cov(rows.T))
    logs = values.flip(0)[5:100].log()
    number = torch.arange(6, 6 + len(logs), dtype=torch.float64)
    x = torch.stack([-number.log(), torch.ones_like(number)], dim=1)
    weights = 1 / number
    return float(torch.linalg.solve(x.T @ (x * weights[:, None]), x.T @ (weights * logs))[0])


def lidar(views: Tensor) -> float:
    """Of ``(inputs, views, features)``: an outer product for every view."""
    n, q, d = views.shape
    mean, means = views.mean((0, 1)), views.mean(1)
    between = torch.zeros(d, d, dtype=views.dtype)
    within = torch.zeros(d, d, dtype=views.dtype)
    for i in range(n):
        between += torch.outer(means[i] - mean, means[i] - mean)
        for j in range(q):
            within += torch.outer(views[i, j] - means[i], views[i, j] - means[i])
    values, vectors = torch.linalg.eigh(within / (n * q) + 1e-4 * torch.eye(d, dtype=views.dtype))
    root = vectors @ torch.diag(values**-0.5) @ vectors.T
    return math.exp(spectral_entropy(root @ (between / n) @ root))


def dime(a: Tensor, b: Tensor, orders: Sequence[Tensor]) -> float:
    first, second = (rows @ rows.T for rows in (normalized(a), normalized(b)))
    apart = 0.0
    for order in orders:
        apart += spectral_entropy(first * second[order][:, order]) / len(orders)
    return apart - spectral_entropy(first * second)


def infonce(a: Tensor, b: Tensor) -> float:
    rows = torch.cat([normalized(a), normalized(b)])
    inputs = torch.arange(len(a)).repeat(2).unsqueeze(0)
    similar = torch.exp(torch.einsum("if, jf -> ij", rows, rows) / 0.1)
    same = inputs.t() == inputs
    positive = (similar * same.clone().fill_diagonal_(0)).sum(1)
    negative = (similar * ~same).sum(1)
    return float(-(positive / (positive + negative)).log().mean())
