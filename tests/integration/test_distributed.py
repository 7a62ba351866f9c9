"""Three real ranks: what they exchange, what they agree on, and how they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.integration.startedranks import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("distributed_program.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found. All exit with 1 at once when rank 1 then fails."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(3, PROGRAM, str(directory), expected=1)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(3)]


def test_each_rank_knows_its_place_and_has_samples_of_its_own(found: list[dict[str, Any]]) -> None:
    assert [one["info"] for one in found] == [[rank, 3, "gloo", "cpu"] for rank in range(3)]
    assert sorted(sample for one in found for sample in one["samples"]) == list(range(9))


def test_collectives_give_sums_averages_and_parts(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        given = one["collectives"]
        assert given["sum"] == [30.0 + 3 * n for n in range(6)]
        assert given["average"] == [10.0 + n for n in range(6)]
        assert given["whole"] == [3, 21]
        assert given["argument"] == [10.0 * rank + n for n in range(6)]


def test_accumulated_gradients_travel_with_the_last_pass_alone(found: list[dict[str, Any]]) -> None:
    first, last = ([one["accumulated"][f"after_{n}"] for one in found] for n in range(2))

    assert first[0] != first[1] != first[2]
    assert last[0] == last[1] == last[2]
    for gradient, whole in zip(last[0], found[0]["accumulated"]["whole"], strict=True):
        assert gradient == pytest.approx(whole, abs=1e-6)


def test_a_checkpoint_holds_each_ranks_generators_and_the_bare_model(
    found: list[dict[str, Any]],
) -> None:
    drawn = [one["checkpointed"]["after"] for one in found]

    assert drawn == [one["checkpointed"]["before"] for one in found]
    assert drawn[0] != drawn[1] != drawn[2]
    for one in found:
        told = one["checkpointed"]
        assert (told["step"], told["which"], told["names"]) == (3, 0, ["bias", "weight"])
    # All ranks learn that one could not be written.
    assert len({one["checkpointed"]["refused"] for one in found}) == 1
    assert "cannot be written" in found[2]["checkpointed"]["refused"]


def test_a_signal_at_one_rank_stops_all_after_the_same_step(found: list[dict[str, Any]]) -> None:
    steps = {one["stopped"] for one in found}

    assert len(steps) == 1
    assert min(steps) >= 4
