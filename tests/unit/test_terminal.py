"""What does not print stays off the terminal."""

from __future__ import annotations

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.terminal import printable, show_error


@pytest.mark.parametrize("text", ["plain", "näive ångström 日本", 'it\'s "quoted" $5 \\n'])
def test_text_that_prints_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\nb", r"a\nb"),
        ("\x9b31m", r"\x9b31m"),
        ("right\u202eleft", r"right\u202eleft"),
        ("\x7f", r"\x7f"),
    ],
)
def test_what_does_not_print_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_an_error_keeps_its_lines_and_loses_its_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(ConfigError("first\n\x1b]0;title\x07second", hint="\x1b[2J"))

    assert capsys.readouterr().err == ("error: first\n\\x1b]0;title\\x07second\nhint: \\x1b[2J\n")
