"""The life of single items, and how a text means one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.cli.reading import life_lines
from hpc_toolkit.errors import ItemsError
from hpc_toolkit.queue.control import SILENT_NODE
from hpc_toolkit.results.explain import explain, find_item
from hpc_toolkit.run import create_run
from hpc_toolkit.rundir.layout import Manifest
from tests.toyrun import ToyRun, spec_of


def life_of(toy: ToyRun, text: str) -> dict[str, Any]:
    view = toy.view()
    return explain(view, find_item(view, text))


def test_an_item_is_found_by_its_number_its_json_or_a_part(fast_dir: Path) -> None:
    items = [{"name": "ab", "g": 1}, {"name": "a", "g": 0}, {"name": "xyz", "g": 1}]
    manifest = Manifest(run="r", stages=(spec_of(group_by="g"),))
    run = create_run(fast_dir / "r", manifest, {"items": items}, sealed=True)

    assert [find_item(run.view, str(number)).item for number in range(3)] == items
    assert find_item(run.view, '{"g": 0, "name": "a"}').item["name"] == "a"
    assert find_item(run.view, '"xy').item["name"] == "xyz"
    assert find_item(run.view, '"name":"a"').item["name"] == "a"


def test_a_text_that_means_no_item_or_several_is_refused(toy: ToyRun) -> None:
    view = toy.view()

    for text in ("nothing", "4", "9" * 5000):
        with pytest.raises(ItemsError, match=f"no item is or contains '{text[:99]}"):
            find_item(view, text)
    with pytest.raises(ItemsError, match="'id' matches 4 items") as caught:
        find_item(view, "id")
    assert "more of its JSON" in caught.value.hint


def test_a_life_names_claims_attempts_and_deaths_by_generation(toy: ToyRun) -> None:
    first, second = toy.worker("first"), toy.worker("second")
    first.work(toy.unit_name(0), 1, i0="done", i1="failed", i2="done", i3="done")
    first.claim(toy.unit_name(0), 2)
    second.claim(toy.unit_name(0), 3)
    second.death(1, generation=2, worker="first", evidence="lease")
    second.attempt(1, value={"x": 1})
    second.release()

    life = life_of(toy, "1")

    assert life["item"] == {"id": 1}
    assert life["unit"] == "000001-0"
    assert life["state"] == "done"
    assert [(one["generation"], one["worker"], one["released"]) for one in life["claims"]] == [
        (1, "first", True),
        (2, "first", False),
        (3, "second", True),
    ]
    assert [(one["type"], one["generation"], one["worker"]) for one in life["attempts"]] == [
        ("failed", 1, "first"),
        ("done", 3, "second"),
    ]
    assert life["attempts"][1]["value"] == {"x": 1}
    assert life["deaths"] == [
        {"generation": 2, "worker": "first", "evidence": "lease", "explained": "", "suspect": True}
    ]
    assert life["counting_attempts"] == 1


def test_i3_a_life_says_whether_the_item_is_suspected_of_the_silence_of_its_nodes(
    toy: ToyRun,
) -> None:
    taker, said = toy.worker("taker"), []
    for generation, host in enumerate(["n1", "n2"], 1):
        taker.claim(toy.unit_name(0), generation)
        facts = {"worker": "w", "host": host, "evidence": "lease", "explained": SILENT_NODE}
        taker.death(1, generation=generation, **facts)
        said.append([line for line in life_lines(life_of(toy, "1")) if "death" in line])

    (alone,), several = said
    assert alone == "    death of w: lease, explained by silent node"
    assert several == [f"{alone}, this item is suspected"] * 2


def test_i8_a_life_passes_over_damaged_lines(toy: ToyRun) -> None:
    worker = toy.worker("w")
    worker.claim(toy.unit_name(0))
    worker.journal.append(b'{"type":"done","item":1\n')
    worker.attempt(1, "failed")
    worker.journal.append(b'{"type":"done"')

    assert [one["type"] for one in life_of(toy, "1")["attempts"]] == ["failed"]
