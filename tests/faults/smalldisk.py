"""A small filesystem in memory that only one process and its children see."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_toolkit.system.processes import die_with_parent

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS, see unshare(2)
_CANNOT = 77
PAGE = 4096


def on_disk(directory: Path, options: str, check: Callable[[], None]) -> None:
    """Call ``check`` in a child for which ``directory`` is a tmpfs(5) of its own.

    The kernel takes the mount away with the child, however that ends.
    """
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root, and mount(8)")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent()
            os.close(read)
            code = _mount(directory, options)
            if code == 0:
                check()
        except BaseException:  # noqa: BLE001 - nothing may run on in the parent's stack
            code = 1
            os.write(write, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == _CANNOT:
        pytest.skip("this machine gives root no mounts of its own")
    assert code == 0, text


def _mount(directory: Path, options: str) -> int:
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
        return _CANNOT
    for words in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)],
    ):
        if subprocess.run(words, check=False, capture_output=True).returncode != 0:
            return _CANNOT
    return 0


def fill(directory: Path, *, pages: int = -1, inodes: int = -1) -> Callable[[], None]:
    """Take all but so much of a filesystem; what gives it back."""
    ballast = directory / ".ballast"
    ballast.mkdir()
    if pages >= 0:
        with (ballast / "large").open("wb") as file:
            while (free := os.statvfs(directory).f_bfree - pages) > 0:
                try:
                    os.posix_fallocate(file.fileno(), 0, free * PAGE)
                except OSError as error:
                    if error.errno != errno.ENOSPC:  # somebody wrote meanwhile
                        raise
                else:
                    break
    if inodes >= 0:
        for number in range(os.statvfs(directory).f_ffree - inodes):
            (ballast / f"{number}").touch()
    return lambda: shutil.rmtree(ballast)
