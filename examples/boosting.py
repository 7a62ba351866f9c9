"""Cross-validation of a gradient-boosted model on the diabetes data of scikit-learn (442 patients).

`score` is the workload of examples/boosting.toml: one item is a setting and a fold.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sklearn.datasets import load_diabetes
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.model_selection import KFold

FOLDS = 5


@cache
def folds() -> tuple[Any, Any, list[Any]]:
    x, y = load_diabetes(return_X_y=True)
    return x, y, list(KFold(FOLDS, shuffle=True, random_state=0).split(x))


def score(item: dict[str, Any]) -> dict[str, float]:
    """R2 on one fold of a model that was trained on the others."""
    settings = {key: value for key, value in item.items() if key != "task"}
    x, y, parts = folds()
    train, test = parts[int(item["task"].removeprefix("fold"))]
    model = GradientBoostingRegressor(random_state=0, **settings).fit(x[train], y[train])
    return {"score": float(model.score(x[test], y[test]))}
