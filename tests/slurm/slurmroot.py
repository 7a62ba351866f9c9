"""Run a command with the Slurm of another Debian release: ``python -m tests.slurm.slurmroot``.

A root with that release's Slurm is built once by debootstrap and kept in the user's cache. Slurm is
all that it provides: the running interpreter, its packages and the repository are mounted into it
at their own paths. A command writes to a layer in memory above the root, so any number of commands
may use a root at the same time, and nothing is left of them, even if they are killed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.lab.programs import search_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

REPOSITORY = Path(__file__).parents[2]
SUITE = "trixie"
PROGRAMS = ("debootstrap", "apt-get", "chroot", "mount", "pivot_root", "setpriv", "unshare")
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "slurmdbd"),
    *("slurm-wlm-mysql-plugin", "mariadb-server", "lmod", "procps", "iproute2", "git"),
    "libgomp1",  # packages of Python that bring no copy of it
    "tini",  # the first process of a namespace has to reap the orphans of all others
)

# When the first process ends, the kernel ends all others; with the last of them go the mounts.
_NAMESPACES = (
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--"),
)

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

# Runs in the directory of the roots. Arguments: a root's name, paths to mount, "--", a command.
_ENTER = """
set -eu
trap 'exit 143' INT TERM
mount -t tmpfs -o mode=755 tmpfs mnt
mkdir mnt/upper mnt/work mnt/root
mount -t overlay -o "lowerdir=$1,upperdir=mnt/upper,workdir=mnt/work" overlay mnt/root
cd mnt/root
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=1777 tmpfs tmp
cp -L /etc/hosts /etc/resolv.conf etc/
shift
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then
    mkdir -p ".$1"
  else
    mkdir -p ".${1%/*}"
    [ -e ".$1" ] || : >".$1"
  fi
  mount --rbind "$1" ".$1"
  shift
done
shift
mkdir .machine
pivot_root . .machine # the kernel denies user namespaces to what runs in a chroot
umount --lazy /.machine
rmdir /.machine
exec chroot . tini -- "$@"
"""


class NoRootError(Exception):
    """This machine cannot have such a root, and why."""


class Roots:
    """Roots of Debian releases in a directory; safe to use from several processes at once."""

    def __init__(self, directory: Path, build: Callable[[str, Path], None] | None = None) -> None:
        self.directory = directory
        self._build = build or bootstrap

    @contextmanager
    def held(self, suite: str) -> Iterator[Path]:
        """A finished root, built if there is none; nobody removes it within the context.

        Raises:
            NoRootError: it could not be built.
        """
        name = f"{suite}-{recipe_digest()}"
        root = self.directory / name
        (self.directory / "mnt").mkdir(parents=True, exist_ok=True)
        with (self.directory / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            while not root.is_dir():
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not root.is_dir():
                    self._make(suite, root)
                # Between the two locks somebody else may have removed it.
                fcntl.flock(lock, fcntl.LOCK_SH)
            yield root

    def _make(self, suite: str, root: Path) -> None:
        """Build a root under another name, so that an interrupted build is never used."""
        partial = root.with_name(f"{root.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        self._build(suite, partial)
        partial.rename(root)
        for lock in self.directory.glob(f"{suite}-*.lock"):
            if lock.stem != root.name:
                _remove_unused(lock)


def _remove_unused(lock_file: Path) -> None:
    """Remove a root of an earlier recipe unless a command still runs in it."""
    with lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        for name in (lock_file.stem, f"{lock_file.stem}.partial"):
            shutil.rmtree(lock_file.with_name(name), ignore_errors=True)


def cache_directory() -> Path:
    """Where this user keeps roots."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hpctk" / "roots"


def recipe_digest() -> str:
    """Changes whenever a root would be built in another way."""
    recipe = "\n".join([platform.machine(), _BUILD, *PACKAGES])
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def bootstrap(suite: str, root: Path) -> None:
    """Build a root in an empty directory: about two minutes and 700 MB.

    Raises:
        NoRootError: a program, the network or a permission is missing.
    """
    log = root.with_name(f"{suite}.log")
    print(f"building Debian {suite} with its Slurm in {root.parent}, log in {log}", file=sys.stderr)
    with log.open("wb") as output:
        done = subprocess.run(
            [*_NAMESPACES, "sh", "-c", _BUILD, "build", suite, debian_mirror(), *PACKAGES],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=root,
            env={**os.environ, "PATH": search_path(), "LC_ALL": "C.UTF-8"},
            check=False,
        )
    if done.returncode != 0:
        shutil.rmtree(root, ignore_errors=True)
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        message = f"Debian {suite} could not be built: {last} (see the whole log in {log})"
        raise NoRootError(message)


def debian_mirror() -> str:
    """The mirror of Debian that apt uses on this machine; "" for debootstrap's own choice."""
    argv = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    # Archives have no label until apt has downloaded their lists.
    found = re.search(r"(?m)^(?:Debian|\$\(LABEL\)) ((?:https?|file):\S+/debian/?)$", done.stdout)
    return found[1] if found else ""


@cache
def mounted_paths(root: Path) -> list[Path]:
    """What a root lacks to run this interpreter with its packages and this repository.

    The prefix of an interpreter may be /usr, which the root has its own of. So these are its
    executables, the directories of modules, and the shared libraries that the root does not have.
    """
    library = sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})
    extensions = Path(library, "lib-dynload").glob("*.so")
    libraries = shared_libraries([Path(sys.executable), *extensions])
    wanted = [
        *(REPOSITORY, logical_repository()),
        *(Path(one) for one in sys.path if os.path.isdir(one)),
        *([Path(sys.prefix)] if sys.prefix != sys.base_prefix else []),
        *linked_names(Path(sys.executable)),
    ]
    missing = [one for one in libraries if not (root / one.relative_to("/")).exists()]
    return outermost([*missing, *wanted, *(one.resolve() for one in wanted)])


def logical_repository() -> Path:
    """The repository as the shell names it, whose path may contain symbolic links."""
    named = Path(os.environ.get("PWD", "/"))
    return named if named.is_dir() and named.samefile(REPOSITORY) else REPOSITORY


def linked_names(path: Path) -> Iterator[Path]:
    """A path, and each path that its symbolic links lead to."""
    yield path
    while path.is_symlink():
        path = Path(os.path.normpath(path.parent / path.readlink()))
        yield path


def shared_libraries(programs: list[Path]) -> set[Path]:
    """The shared libraries that programs and extension modules load here."""
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)
    return {Path(os.path.normpath(one)) for one in re.findall(r"=> (/.*) \(0x", done.stdout)}


def outermost(paths: Iterable[Path]) -> list[Path]:
    """The paths that lie below no other of them."""
    every = set(paths) - {Path("/")}
    return sorted(one for one in every if every.isdisjoint(one.parents))


def run_in(root: Path, argv: list[str], *, capture: bool = False) -> tuple[int, str]:
    """Run a command in a root, in the repository; its exit code and captured output.

    SIGINT and SIGTERM are passed on to the command. If this process is killed, so is the command.
    """
    kept = {key: text for key, text in os.environ.items() if not key.startswith("XDG_")}
    kept.pop("TMPDIR", None)
    here = logical_repository()
    with subprocess.Popen(
        [
            *(*_NAMESPACES, "sh", "-c", _ENTER, "enter", root.name),
            *(
                *map(str, mounted_paths(root)),
                "--",
                "env",
                "-C",
                str(REPOSITORY),
                f"PWD={here}",
                *argv,
            ),
        ],
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.STDOUT if capture else None,
        cwd=root.parent,
        env={**kept, "PATH": search_path(), "HOME": "/root", "LC_ALL": "C.UTF-8"},
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


def check_machine() -> None:
    """Return if this machine can have roots.

    Raises:
        NoRootError: it cannot, and why.
    """
    missing = [one for one in PROGRAMS if shutil.which(one, path=search_path()) is None]
    if missing:
        message = f"{', '.join(missing)} missing: run .ci/system"
        raise NoRootError(message)
    if os.geteuid() != 0:
        message = "only root can build and enter a root"
        raise NoRootError(message)
    done = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = f"no namespaces of our own here: {' '.join(done.stderr.split())}"
        raise NoRootError(message)


def main() -> int:
    """Run a command of the command line in a root; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.slurmroot", description=__doc__)
    parser.add_argument("--suite", default=SUITE, help="Debian release [%(default)s].")
    parser.add_argument(
        "--or-skip",
        action="store_true",
        help="Exit 0 where there can be no root, unless HPCTK_FORBID_SKIP is set.",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="Put it after '--'.")
    given = parser.parse_args()
    try:
        check_machine()
        with Roots(cache_directory()).held(given.suite) as root:
            code, version = run_in(root, ["slurmctld", "-V"], capture=True)
            if code != 0:
                message = f"no command runs in {root}: {' '.join(version.split())}"
                raise NoRootError(message)
            print(f"{version.strip()} of Debian {given.suite}, in {root}", flush=True)
            return run_in(root, given.command)[0]
    except NoRootError as error:
        print(f"skipped on Debian {given.suite}: {error}", file=sys.stderr)
        return 0 if given.or_skip and not os.environ.get("HPCTK_FORBID_SKIP") else 1


if __name__ == "__main__":
    sys.exit(main())
