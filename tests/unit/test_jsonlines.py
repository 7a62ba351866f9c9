"""Many texts in one call give what json gives one by one, and are refused where it refuses."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.errors import ItemsError
from hpc_toolkit.queue.items import check_items
from hpc_toolkit.system.jsonlines import decode_each, encode_each, without_collections

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=5)
NUMBERS = st.integers() | st.integers(-(10**40), 10**40) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | ANY_TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT | st.integers(0, 2), inner)
    ),
    max_leaves=6,
)
ODD = ["", " ", "NaN", "-Infinity", "1e999", "\\", '"\\ud800"', "\x7f", "\ufeff", '{"a":1,"a":2}']
PARTS = ["{", "}", "[", "]", ",", ":", '"', '"a"', "1", '{"a":1', '"b":2}', '{"a":1},{"b":2}']
TEXTS = st.sampled_from([*ODD, *PARTS]) | VALUES.map(json.dumps)


def attempt(call: Callable[[], Any]) -> str:
    """What a call gives, or that it refuses."""
    try:
        return repr(call())
    except (ItemsError, TypeError, ValueError):
        return "refused"


def strict(text: str) -> Any:
    """What json decodes, without the constants that JSON does not have."""
    constants: list[str] = []
    found = json.loads(text, parse_constant=constants.append)
    if constants:
        raise ValueError(constants)
    return found


@given(st.lists(VALUES, max_size=5))
def test_values_are_encoded_as_json_does_one_by_one(values: list[Any]) -> None:
    def one(value: Any) -> bytes:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

    assert attempt(lambda: encode_each(values)) == attempt(lambda: list(map(one, values)))


@given(st.lists(TEXTS, max_size=4))
def test_texts_are_decoded_or_refused_as_json_does_one_by_one(texts: list[str]) -> None:
    together = attempt(lambda: decode_each([text.encode() for text in texts]))

    assert together == attempt(lambda: list(map(strict, texts)))


@pytest.mark.parametrize(
    "texts",
    [
        [b'{"a":1', b'"b":2}'],
        [b'{"a":1},{"b":2}', b'{"c":[3', b"4]}"],
        [b'{"a":1}]', b'[{"b":2}'],
        [b'{"a":"\xff"}'],
    ],
)
def test_texts_that_are_json_only_together_are_refused(texts: list[bytes]) -> None:
    assert attempt(lambda: decode_each(texts)) == "refused"


@settings(max_examples=40)
@given(st.lists(VALUES.filter(lambda one: isinstance(one, dict)), min_size=2, max_size=6))
def test_items_are_duplicates_iff_they_are_equal_with_sorted_keys(items: list[Any]) -> None:
    def canonical(item: Any) -> str:
        text = json.dumps(item, sort_keys=True, allow_nan=False)
        if json.loads(text) != item:
            raise ValueError(item)  # a key was not text
        return text

    def by_form() -> bool:
        return len(set(map(canonical, items))) == len(items)

    def checked() -> bool:
        return len(check_items(items, group_by=None)) == len(items)

    assert (attempt(checked) == "True") == (attempt(by_form) == "True")


def test_collections_go_on_after_the_block() -> None:
    before = gc.isenabled()
    gc.enable()
    try:
        with without_collections():
            assert not gc.isenabled()

        assert gc.isenabled()
    finally:
        if not before:
            gc.disable()
