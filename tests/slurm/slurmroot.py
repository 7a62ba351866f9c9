"""Run a command with the Slurm of another Debian release: ``python -m tests.slurm.slurmroot``.

The root has a /tmp of its own, and of this machine only the running interpreter, its packages and
the repository, at their own paths. Nothing is left of a command, even if it is killed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.lab.commands import OWN_NAMESPACES, entering, interpreter_paths, search_path
from hpc_toolkit.rundir.files import publish_directory, remove_tree

REPOSITORY = Path(__file__).parents[2]
SUITE = "trixie"
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "slurmdbd"),
    *("slurm-wlm-mysql-plugin", "mariadb-server", "lmod", "procps", "iproute2", "git"),
    "libgomp1",  # packages of Python that bring no copy of it
    "tini",  # the first process of a namespace has to reap the orphans of all others
)
NFS_PACKAGES = (
    *("user-mode-linux", "nfs-kernel-server", "nfs-common", "rpcbind", "kmod", "e2fsprogs"),
    *("gcc", "libc6-dev", "util-linux-extra"),
)
"""What tests/sharedfs needs to have NFS between the kernels of that release."""


_BUILDERS = ("debootstrap", "apt-get", "unshare", "setpriv", "mount")
_SCRIPTS = Path("/usr/share/debootstrap/scripts")

# Runs in the new root's directory. Arguments: suite, mirror or "", packages. The root is mounted at
# /mnt, since debootstrap does not take every path. Proxies and the like are this machine's own.
_BUILD = """
set -eu
suite=$1 mirror=$2
shift 2
mount --bind . /mnt
eval "$(apt-config shell http_proxy Acquire::http::Proxy https_proxy Acquire::https::Proxy)"
export http_proxy https_proxy DEBIAN_FRONTEND=noninteractive
debootstrap --variant=minbase "$suite" /mnt ${mirror:+"$mirror"}
cd /mnt
apt-config dump | grep '^Acquire::' >etc/apt/apt.conf.d/90machine
for file in /etc/ssl/certs/ca-certificates.crt $(apt-config shell file Acquire::https::CAInfo/f); do
  file=${file#file=}
  file=${file#\\'}
  file=${file%\\'}
  if [ -f "$file" ]; then mkdir -p ".${file%/*}" && cp -L "$file" ".$file"; fi
done
printf '#!/bin/sh\\nexit 101\\n' >usr/sbin/policy-rc.d # packages start no services
chmod 755 usr/sbin/policy-rc.d
echo force-unsafe-io >etc/dpkg/dpkg.cfg.d/unsafe-io # synced below, once
chroot . apt-get install -y -qq --no-install-recommends "$@"
chroot . apt-get clean
rm -rf var/lib/apt/lists/*
chroot . slurmctld -V
sync -f .
"""


def debian_root(
    suite: str, tell: Callable[[str], None], packages: tuple[str, ...] = PACKAGES
) -> Path:
    """Return the root of a Debian release in the user's cache; build it if it is missing.

    Of several concurrent callers one builds it; the others wait for it. ``tell`` then gets one
    line. Raises ConfigError: it cannot be built here.
    """
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hpctk/roots")
    # Another name whenever it would be built in another way.
    recipe = "\n".join([platform.machine(), _BUILD, *packages])
    root = directory / f"{suite}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if os.geteuid() != 0:
        raise ConfigError("only root can build and enter a root")
    if not root.is_dir():
        _check_release(suite)
        directory.mkdir(parents=True, exist_ok=True)
        _build_once(suite, root, tell, packages)
    return root


def _build_once(
    suite: str, root: Path, tell: Callable[[str], None], packages: tuple[str, ...]
) -> None:
    with FileLock(root.with_suffix(".lock")):
        if root.is_dir():
            return
        tell(f"building Debian {suite} with its Slurm: 2 minutes, 700 MB below {root.parent}")
        # Built under another name, so that an interrupted build is never used.
        unfinished = root.with_suffix(".partial")
        remove_tree(unfinished)
        unfinished.mkdir()
        try:
            _bootstrap(suite, unfinished, packages)
            publish_directory(unfinished, root)
        finally:
            remove_tree(unfinished)


def _check_release(suite: str) -> None:
    path = search_path()
    missing = [one for one in _BUILDERS if shutil.which(one, path=path) is None]
    if missing:
        message = f"a root of Debian {suite} needs programs that are not installed: "
        packages = "debootstrap util-linux mount"
        hint = f"on Debian and Ubuntu: apt-get install {packages}"
        raise ConfigError(message + ", ".join(missing), hint=hint)
    known = [one.name for one in _SCRIPTS.iterdir() if one.resolve().name == "sid"]
    if suite not in known:
        message = f"{suite!r} is not a Debian release that debootstrap knows"
        raise ConfigError(message, hint=near_miss(suite, known))


def _bootstrap(suite: str, root: Path, packages: tuple[str, ...]) -> None:
    """Build a root in an empty directory."""
    log = root.with_name(f"{suite}.log")
    with log.open("wb") as output:
        done = subprocess.run(
            [*OWN_NAMESPACES, "sh", "-c", _BUILD, "build", suite, _debian_mirror(), *packages],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=root,
            env={**os.environ, "PATH": search_path(), "LC_ALL": "C.UTF-8"},
            check=False,
        )
    if done.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        message = f"Debian {suite} could not be built: {last}"
        hint = f"see the whole log in {log}; a mirror of Debian must be reachable"
        raise ConfigError(message, hint=hint)


def _debian_mirror() -> str:
    """The mirror of Debian that apt uses on this machine; "" for debootstrap's own choice."""
    argv = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    # Archives have no label until apt has downloaded their lists.
    found = re.search(r"(?m)^(?:Debian|\$\(LABEL\)) ((?:https?|file):\S+/debian/?)$", done.stdout)
    return found[1] if found else ""


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
