"""Learning rates that grow with the batch."""

from __future__ import annotations

import pytest

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.training.distributed import scaled


def test_the_rate_grows_with_the_global_batch() -> None:
    # Goyal et al. 2017: 0.1 for 256 images becomes 3.2 for 8,192 on 256 GPUs with 32 each.
    found = scaled(32, 0.1, 256, 256)

    assert found.global_batch == 8192
    assert found.learning_rate == pytest.approx(3.2)
    assert scaled(8, 0.1, 256, 256, accumulation=4) == found


def test_a_warm_up_rises_from_the_base_rate() -> None:
    found = scaled(32, 0.1, 32, 4)

    rates = [found.warmed_up(step, 4) for step in range(6)]

    assert rates == pytest.approx([0.1, 0.175, 0.25, 0.325, 0.4, 0.4])
    assert found.warmed_up(0, 0) == found.learning_rate


@pytest.mark.parametrize("name", ["batch_per_rank", "base_rate", "base_batch", "world_size"])
def test_numbers_that_are_not_positive_are_refused(name: str) -> None:
    numbers = {"batch_per_rank": 1, "base_rate": 1, "base_batch": 1, "world_size": 1, name: 0}

    with pytest.raises(HpcToolkitError, match=f"{name} must be above 0"):
        scaled(**numbers)
