"""Keys as terminals send them."""

from __future__ import annotations

import pytest

from hpc_toolkit.cli.screen import split_keys


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("jq", ["j", "q"]),
        ("\x1b[A\x1bOBk", ["up", "down", "k"]),
        ("\x1b[5~\x1b[6~", ["pageup", "pagedown"]),
        ("\x1b", ["escape"]),
        ("\x1b[1;5Cx", ["x"]),
        ("\x1b[15~y", ["y"]),
        ("\r", ["enter"]),
        ("é", ["é"]),
    ],
)
def test_keys_that_arrive_together_are_told_apart(text: str, keys: list[str]) -> None:
    assert split_keys(text) == keys
