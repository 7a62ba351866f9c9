"""Roots with another Slurm than this machine's: find or build one, and enter it.

A root is the directory tree of a distribution. A process that enters it sees the root's programs
and settings (/usr, /etc, /opt, /var), and the machine's files everywhere else. It writes to a layer
in memory above the root, so any number of processes can use a root at once, none changes it, and
nothing is left of them, even if they are killed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.lab.commands import search_path
from hpc_toolkit.rundir.files import publish_directory, remove_tree
from hpc_toolkit.system.installation import OF_USER

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "slurmdbd"),
    *("slurm-wlm-mysql-plugin", "mariadb-server", "lmod", "procps", "iproute2", "git"),
    "libgomp1",  # packages of Python that bring no copy of it
    "tini",  # the first process of a namespace has to reap the orphans of all others
)

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

_BUILDERS = ("debootstrap", "apt-get", "unshare", "setpriv", "mount")
_SCRIPTS = Path("/usr/share/debootstrap/scripts")
_INSTEAD = "or give --slurm the directory of a root that contains Slurm"

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


def find_root(
    given: str, tell: Callable[[str], None], packages: tuple[str, ...] = PACKAGES
) -> Path:
    """Return the root that ``--slurm`` names: a directory, or that of a Debian release.

    The root of a release is built with these packages if it does not exist yet; ``tell`` then gets
    one line.
    """
    if os.geteuid() != 0:
        message = "--slurm: only root can start a lab with a Slurm that is not installed"
        raise ConfigError(message, hint="run the command as root, or without --slurm")
    if "/" not in given:
        return debian_root(given, cache_directory(), tell, packages=packages)
    root = Path(given).expanduser().resolve()
    if not root.is_dir():
        message = f"--slurm: {given} is not a directory"
        raise ConfigError(message, hint="unpack an image that contains Slurm there")
    if root == Path("/"):
        # The layer in memory would not cover it, so that its directories were written to this disk.
        message = f"--slurm: {given} is the root of this machine"
        raise ConfigError(message, hint="leave out --slurm to use the Slurm of this machine")
    return root


def cache_directory() -> Path:
    """Where this user keeps roots of Debian releases."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hpctk" / "roots"


def debian_root(
    suite: str,
    directory: Path,
    tell: Callable[[str], None],
    build: Callable[[str, Path], None] | None = None,
    packages: tuple[str, ...] = PACKAGES,
) -> Path:
    """Return the root of a Debian release below ``directory``; build it if it is missing.

    Of several concurrent callers one builds it; the others wait for it.
    """
    root = directory / f"{suite}-{recipe_digest(packages)}"
    if not root.is_dir():
        _check_release(suite)
        directory.mkdir(parents=True, exist_ok=True)
        _build_once(suite, root, tell, build or partial(_bootstrap, packages=packages))
    return root


def _build_once(
    suite: str, root: Path, tell: Callable[[str], None], build: Callable[[str, Path], None]
) -> None:
    from filelock import FileLock

    with FileLock(root.with_suffix(".lock")):
        if root.is_dir():
            return
        tell(f"building Debian {suite} with its Slurm: 2 minutes, 700 MB below {root.parent}")
        # Built under another name, so that an interrupted build is never used.
        unfinished = root.with_suffix(".partial")
        remove_tree(unfinished)
        unfinished.mkdir()
        try:
            build(suite, unfinished)
            publish_directory(unfinished, root)
        finally:
            remove_tree(unfinished)


def recipe_digest(packages: tuple[str, ...] = PACKAGES) -> str:
    """Changes whenever a root would be built in another way."""
    recipe = "\n".join([platform.machine(), _BUILD, *packages])
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def _check_release(suite: str) -> None:
    path = search_path()
    missing = [one for one in _BUILDERS if shutil.which(one, path=path) is None]
    if missing:
        message = f"a root of Debian {suite} needs programs that are not installed: "
        packages = "debootstrap util-linux mount"
        hint = f"on Debian and Ubuntu: apt-get install {packages}; {_INSTEAD}"
        raise ConfigError(message + ", ".join(missing), hint=hint)
    known = [one.name for one in _SCRIPTS.iterdir() if one.resolve().name == "sid"]
    if suite not in known:
        message = f"--slurm: {suite!r} is not a Debian release that debootstrap knows"
        directory = f"write the directory as './{suite}'" if Path(suite).is_dir() else ""
        raise ConfigError(message, hint=directory or near_miss(suite, known))


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
        hint = f"see the whole log in {log}; a mirror of Debian must be reachable, {_INSTEAD}"
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
