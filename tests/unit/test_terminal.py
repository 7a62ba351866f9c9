"""What terminals get and send: what prints keeps to its columns; readings that are kept."""

from __future__ import annotations

import pytest

from hpc_toolkit.cli.liveview import split_keys
from hpc_toolkit.system.terminal import columns, cut, pad, printable, wrap


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((text, text) for text in ("plain", "näive 日本", 'it\'s "quoted" $5 \\n')),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\nb", r"a\nb"),
        ("\x9b31m", r"\x9b31m"),
        ("right\u202eleft", r"right\u202eleft"),
        ("\x7f", r"\x7f"),
    ],
)
def test_what_does_not_print_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


COMBINED = "e\u0301"


@pytest.mark.parametrize(
    ("text", "count"),
    [("plain", 5), ("日本", 4), ("\U0001f600", 2), (COMBINED, 1), ("a日" + COMBINED, 4)],
)
def test_a_text_takes_the_columns_of_its_characters(text: str, count: int) -> None:
    assert columns(text) == count
    assert pad(text, 8) == text + " " * (8 - count)


def test_a_cut_text_keeps_to_its_columns_and_a_letter_keeps_its_accent() -> None:
    assert cut("日本語", 6) == "日本語"
    assert cut("日本語.", 6) == "日..."
    assert cut(COMBINED * 9, 5) == COMBINED * 2 + "..."


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("one two  three", ["one two", "  three"]),
        ("    kept in front", ["    kept", "  in", "  front"]),
        ("a 0123456789", ["a 012345", "  6789"]),
        ("日本 語日本", ["日本", "  語日本"]),
        ("x日本語日本語", ["x日本語", "  日本語"]),
    ],
)
def test_a_text_is_wrapped_by_columns(text: str, lines: list[str]) -> None:
    assert wrap(text, 8, indent="  ") == lines


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
