"""What the text of a rendered script says, read as bash would read it."""

from __future__ import annotations

import shlex


def batch_words(script: str) -> list[str]:
    """The words of the command that starts the batch process, after ``exec``."""
    command = script[script.index("\nexec ") :].replace("\\\n", " ")
    return shlex.split(command)[1:]


def batch_program(script: str) -> list[str]:
    """The words of the user's program, without the script's own arguments."""
    words = batch_words(script)
    return words[words.index("--") + 2 : -1]
