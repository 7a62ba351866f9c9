"""How an error reaches people: on the command line, and from Python."""

from __future__ import annotations

import copy
import errno
import os
import traceback

import pytest

from hpc_toolkit import cli
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.results.gather import NotCompleteError


@pytest.mark.parametrize("kind", [ConfigError, NotCompleteError])
@pytest.mark.parametrize("hint", ["how to fix it", ""])
def test_a_traceback_ends_with_the_message_and_the_hint(kind: type[ConfigError], hint: str) -> None:
    error = kind("what is wrong", hint=hint)

    # Copying rebuilds an object as pickle does on the other side of a process border.
    for one in (error, copy.copy(error), copy.deepcopy(error)):
        said = "".join(traceback.format_exception(one))
        end = f"hint: {hint}\n" if hint else ""
        assert said.endswith(f"{kind.__module__}.{kind.__name__}: what is wrong\n{end}")


# Python raises BrokenPipeError for ESHUTDOWN as well.
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.ENOSPC])
def test_a_filesystem_that_does_not_answer_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    def refuse(_: str) -> None:
        raise OSError(code, os.strerror(code), "/project/run/head")

    monkeypatch.setattr(cli, "load_commands", refuse)

    # Not main(), which ends the whole process where nothing must be taken down.
    with pytest.raises(SystemExit) as caught:
        cli._run("")

    assert caught.value.code == 75
    assert capsys.readouterr().err == (
        f"error: /project/run/head: {os.strerror(code)}\n"
        "hint: fix that and try again; nothing that was recorded is lost\n"
    )
