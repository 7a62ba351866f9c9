"""Pythia as data, and the list of items that 'hpctk items pythia' prints of it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.items import check_items
from hpc_toolkit.science.workloads.pythia import REVISIONS, parse_layers, parse_steps
from tests.unit import jobcommands

GRID = ("--sizes", "14m,70m,410m", "--steps", "0,1000:143000:1000")


call = partial(jobcommands.call, "items", "pythia")


def test_grid_of_three_sizes_is_exactly_5184_lines_that_a_run_takes() -> None:
    result = call(*GRID, "--layers", "blocks")

    lines = result.stdout.splitlines()
    items = [json.loads(line) for line in lines]
    assert (result.exit_code, result.stderr, len(lines)) == (0, "", 5184)
    check_items(items, group_by="checkpoint")
    assert len({item["checkpoint"] for item in items}) == 432
    assert items[0] == {"checkpoint": "EleutherAI/pythia-14m@step0", "layer": 1}
    assert items[-1] == {"checkpoint": "EleutherAI/pythia-410m@step143000", "layer": 24}


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (("--layers", "all"), 144 * 39),
        (("--layers", "last"), 144 * 3),
        (("--layers", "0,2:6:2"), 144 * 3 * 4),
        ((), 5184),
    ],
)
def test_layers_are_those_of_each_size(arguments: tuple[str, ...], count: int) -> None:
    assert len(call(*GRID, *arguments).stdout.splitlines()) == count


def test_there_are_154_revisions() -> None:
    assert len(REVISIONS) == len(set(REVISIONS)) == 154
    assert REVISIONS[:13] == (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000)
    assert REVISIONS[-1] == 143_000
    assert parse_steps("all") == list(REVISIONS)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("143000, 0,0", [0, 143_000]),
        ("1000:4000:1000", [1000, 2000, 3000, 4000]),
        ("1000:143000:50000", [1000, 51_000, 101_000]),
        ("128:2000", [128, 256, 512, 1000, 2000]),
        ("512:512", [512]),
        ("0:143000", list(REVISIONS)),
    ],
)
def test_steps_are_read_with_their_end_and_sorted(text: str, steps: list[int]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("0,1500", "'1500': there is no checkpoint at step 1500", "at step 1000"),
        ("0:1000:500", "'0:1000:500': .* at step 500", "at step 512"),
        ("0:3", "'0:3': .* at step 3", "at step 2"),
        ("144000", "step 144000", "at step 143000"),
        ("2000:1000:1000", "1000 is before 2000", "ascending"),
        ("0:1000:0", "the stride is 0", "FIRST"),
        ("main", "'main': not a number", "such as"),
        ("", "'': not a number", "such as"),
        ("-1", "'-1': -1 is negative", "count from 0"),
        ("1:2:3:4", "not a number", "such as"),
    ],
)
def test_steps_that_cannot_be_are_refused_with_the_nearest(
    text: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_steps(text)

    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7", "'7': pythia-14m has the layers 0 to 6"),
        ("0:99999999999", "'0:99999999999': pythia-14m has the layers 0 to 6"),
        ("block", "not a number, a range, blocks, all or last"),
        ("blocks,0", "not a number, a range"),
        ("1.5", r"'1\.5': not a number"),
    ],
)
def test_layers_that_a_size_does_not_have_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layers(text, "14m")
