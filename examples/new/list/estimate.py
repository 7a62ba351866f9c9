"""`estimate` is called for each item of the list; replace it by a function of yours."""

import random
import time


def estimate(points, seed):
    """Estimate pi from random points: the share of them inside a quarter of a circle."""
    draw = random.Random(seed)
    inside = sum(draw.random() ** 2 + draw.random() ** 2 < 1 for _ in range(points))
    time.sleep(1 + draw.random())  # stands for a longer computation
    return {"pi": 4 * inside / points}
