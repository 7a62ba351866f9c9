"""How an error of a filesystem reaches people on the command line."""

from __future__ import annotations

import errno
import os

import pytest

from hpc_toolkit import cli


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
