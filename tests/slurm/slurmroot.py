"""Run a command with the Slurm of another Debian release: ``python -m tests.slurm.slurmroot``.

The root has a /tmp of its own, and of this machine only the running interpreter, its packages and
the repository, at their own paths. Nothing is left of a command, even if it is killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.lab.commands import OWN_NAMESPACES, entering, interpreter_paths, search_path
from tests.slurm.debianroot import PACKAGES, debian_root

REPOSITORY = Path(__file__).parents[2]
SUITE = "trixie"
NFS_PACKAGES = (
    *("user-mode-linux", "nfs-kernel-server", "nfs-common", "rpcbind", "kmod", "e2fsprogs"),
    *("gcc", "libc6-dev", "util-linux-extra"),
)
"""What tests/sharedfs needs to have NFS between the kernels of that release."""


def logical_repository() -> Path:
    """The repository as the shell names it, whose path may contain symbolic links."""
    named = Path(os.environ.get("PWD", "/"))
    return named if named.is_dir() and named.samefile(REPOSITORY) else REPOSITORY


def run_in(root: Path, argv: list[str], *, capture: bool = False) -> tuple[int, str]:
    """Run a command in a root, in the repository; its exit code and captured output.

    SIGINT and SIGTERM are passed on to the command. If this process is killed, so is the command.
    """
    kept = {key: text for key, text in os.environ.items() if not key.startswith("XDG_")}
    kept.pop("TMPDIR", None)
    here = logical_repository()
    script = entering(root, [*interpreter_paths(root), REPOSITORY, here, Path("/etc/hosts")])
    with subprocess.Popen(
        [*OWN_NAMESPACES, "sh", "-c", script, "enter", "tini", "--", *argv],
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.STDOUT if capture else None,
        cwd=here,
        env={**kept, "PATH": search_path(), "HOME": "/root", "LC_ALL": "C.UTF-8", "PWD": str(here)},
        text=True,
        start_new_session=True,
    ) as process:

        def pass_on(number: int, _frame: object) -> None:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            for pid in children.split():
                os.kill(int(pid), number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
        output, _ = process.communicate()
        return process.returncode, output or ""


def main() -> int:
    """Run a command of the command line in a root; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.slurmroot", description=__doc__)
    parser.add_argument("--suite", default=SUITE, help="Debian release [%(default)s].")
    parser.add_argument(
        "--or-skip",
        action="store_true",
        help="Exit 0 where there can be no root, unless HPCTK_FORBID_SKIP is set.",
    )
    parser.add_argument("--nfs", action="store_true", help="Also provide kernels for NFS.")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="Put it after '--'.")
    given = parser.parse_args()
    try:
        packages = (*PACKAGES, *(NFS_PACKAGES if given.nfs else ()))
        root = debian_root(given.suite, lambda text: print(text, file=sys.stderr), packages)
        code, version = run_in(root, ["slurmctld", "-V"], capture=True)
        if code != 0:
            message = f"no command runs in {root}: {' '.join(version.split())}"
            raise ConfigError(message)
    except ConfigError as error:
        print(f"skipped on Debian {given.suite}: {error.message}", file=sys.stderr)
        return 0 if given.or_skip and not os.environ.get("HPCTK_FORBID_SKIP") else 1
    print(f"{version.strip()} of Debian {given.suite}, in {root}", flush=True)
    return run_in(root, given.command)[0]


if __name__ == "__main__":
    sys.exit(main())
