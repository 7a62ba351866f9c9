"""How an error reaches people: on the command line, and from Python."""

from __future__ import annotations

import copy
import errno
import os
import traceback
from pathlib import Path

import pytest

from hpc_toolkit import cli
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.results.gather import NotCompleteError
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.worker.worker import unwritable


@pytest.mark.parametrize("kind", [ConfigError, NotCompleteError])
def test_a_traceback_ends_with_the_hint(kind: type[ConfigError]) -> None:
    error = kind("what is wrong", hint="how to fix it")

    # Copying rebuilds an object as pickle does on the other side of a process border.
    for one in (error, copy.copy(error), copy.deepcopy(error)):
        last = "".join(traceback.format_exception(one)).splitlines()[-2:]
        assert last == [
            f"{kind.__module__}.{kind.__name__}: what is wrong",
            "hint: how to fix it",
        ]


def test_a_traceback_without_a_hint_ends_with_the_message() -> None:
    error = ConfigError("what is wrong")

    assert traceback.format_exception(error)[-1].endswith("ConfigError: what is wrong\n")


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


def test_the_hint_for_an_evicted_host_does_not_assume_cephfs(tmp_path: Path) -> None:
    """Lustre evicts hosts with the same error, and connects them again by itself."""
    evicted = OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN))

    found = unwritable(RunPaths(tmp_path), evicted)

    assert found.exit_code == 75
    assert found.hint.startswith("the file server has evicted this host; on CephFS, mount the file")
