"""Roots with another Slurm than this machine's: find one, and enter it.

A root is the directory tree of a distribution. A process that enters it sees the root's programs
and settings (/usr, /etc, /opt, /var), and the machine's files everywhere else. It writes to a layer
in memory above the root, so any number of processes can use a root at once, none changes it, and
nothing is left of them, even if they are killed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.installation import OF_USER

# When the first process ends, the kernel ends all others; with the last of them go the mounts.
OWN_NAMESPACES = (
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--"),
)

# Directories of the machine that a root has its own of.
_OWN = {
    *("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32"),
    *("opt", "proc", "run", "sbin", "sys", "usr", "var"),
}

# Arguments: a root, paths of this machine to mount in it, "--", a command. The layer in memory is
# mounted over the root itself, and unbindable, or it would appear again below the mounted paths.
_ENTER = """
set -eu
trap 'exit 143' INT TERM
here=$PWD
root=$1
shift
cd "$root"
mount -t tmpfs -o mode=755 tmpfs "$root"
mkdir "$root/upper" "$root/work" "$root/root"
mount -t overlay -o "lowerdir=.,upperdir=$root/upper,workdir=$root/work" "$root" "$root/root"
mount --make-runbindable "$root"
cd "$root/root"
mkdir -p proc sys dev tmp
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=1777 tmpfs tmp
[ ! -e /etc/resolv.conf ] || cp -L --remove-destination /etc/resolv.conf etc/
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
mount --make-private .
mkdir .machine
pivot_root . .machine # the kernel denies user namespaces to what runs in a chroot
umount --lazy /.machine
rmdir /.machine
if ! cd "$here" 2>/dev/null; then
  echo "error: $here is not a directory in $root" >&2
  exit 1
fi
exec "$@"
"""


def find_root(given: str) -> Path:
    """Return the directory that ``--slurm`` names. Raises ConfigError: it cannot be a root."""
    if os.geteuid() != 0:
        message = "--slurm: only root can start a lab with a Slurm that is not installed"
        raise ConfigError(message, hint="run the command as root, or without --slurm")
    root = Path(given).expanduser().resolve()
    if not root.is_dir():
        message = f"--slurm: {given} is not a directory"
        raise ConfigError(message, hint="unpack an image that contains Slurm there")
    if root == Path("/"):
        # The layer in memory would not cover it, so that its directories were written to this disk.
        message = f"--slurm: {given} is the root of this machine"
        raise ConfigError(message, hint="leave out --slurm to use the Slurm of this machine")
    return root


def entering(root: Path, paths: list[Path]) -> str:
    """Return a shell script that runs its arguments in a root, in the current directory.

    The script needs a mount namespace of its own. ``paths`` of the machine are mounted in the root.
    """
    root, paths = root.resolve(), _outermost(paths)
    for path in paths:
        # Followed by mount(8) before the root is entered, such a link would lead to the machine.
        if not (root / path.relative_to("/")).resolve().is_relative_to(root):
            message = f"{root}: a symbolic link at {path} leads out of this directory"
            raise ConfigError(message, hint="replace the link by a directory or a relative link")
    return f'set -- {shlex.join([str(root), *map(str, paths), "--"])} "$@"\n{_ENTER}'


def machine_paths() -> list[Path]:
    """Directories in / that a root does not have its own of: home directories, /tmp, /scratch."""
    # Path.is_dir() raises an error for a stale mount.
    return [one for one in Path("/").iterdir() if one.name not in _OWN and os.path.isdir(one)]


def interpreter_paths(root: Path) -> list[Path]:
    """What a root lacks to run this interpreter with its packages.

    The prefix of an interpreter may be /usr, which the root has its own of. So these are its
    executables, the directories of modules, and the shared libraries that the root does not have.
    """
    library = sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})
    extensions = Path(library, "lib-dynload").glob("*.so")
    ldd = ["ldd", sys.executable, *map(str, extensions)]
    done = subprocess.run(ldd, capture_output=True, text=True, check=False)
    libraries = {Path(os.path.normpath(one)) for one in re.findall(r"=> (/.*) \(0x", done.stdout)}
    # The first is the directory of the program, which may be /usr/bin.
    modules = sys.path if sys.flags.safe_path or OF_USER else sys.path[1:]
    return [
        *(one for one in libraries if not (root / one.relative_to("/")).exists()),
        *(Path(one) for one in modules if os.path.isdir(one)),
        Path(__file__).parents[2],
        *([Path(sys.prefix)] if sys.prefix != sys.base_prefix else []),
        *_linked_names(Path(sys.executable)),
    ]


def _linked_names(path: Path) -> Iterator[Path]:
    """A path, and each path that its symbolic links lead to."""
    yield path
    while path.is_symlink():
        path = Path(os.path.normpath(path.parent / path.readlink()))
        yield path


def _outermost(paths: list[Path]) -> list[Path]:
    """The paths that lie below no other of them, with the directories that links lead to."""
    every = {*paths, *(one.resolve() for one in paths if os.path.isdir(one))} - {Path("/")}
    return sorted(one for one in every if every.isdisjoint(one.parents))
