"""Views of a text: seeded, small, and never empty."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.science.workloads.layer_metrics import augment

TEXT = (
    "The ministers agreed on Monday that the budget would be laid before parliament in March, "
    "and that no other tax was to rise in the year after it."
)


def test_a_view_is_the_same_on_every_machine_and_day() -> None:
    assert augment("the cat sat on the mat in the rain", 0) == "the cat sat on the mat ni the rain"


def test_one_word_in_ten_is_changed_and_all_else_stays() -> None:
    views = [augment(TEXT, view) for view in range(16)]

    assert len(set(views)) == 16
    for changed in views:
        assert 0.9 < SequenceMatcher(None, TEXT, changed, autojunk=False).ratio() < 1
        # What a word loses or gains is one letter or one space.
        assert abs(len(changed) - len(TEXT)) <= round(0.1 * len(TEXT.split()))


@given(st.text(), st.integers(0, 20))
def test_a_view_has_no_fewer_letters_than_its_text(text: str, view: int) -> None:
    changed = augment(text, view)

    assert len(changed) >= len(text)
    assert len(re.sub(r"\s", "", changed)) == len(re.sub(r"\s", "", text))
    assert (changed != text) == bool(re.search(r"\S\S", text))
