"""The roots of Debian releases with their Slurm, which tests of other versions enter."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.lab.commands import OWN_NAMESPACES, search_path
from hpc_toolkit.rundir.files import publish_directory, remove_tree

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "slurmdbd"),
    *("slurm-wlm-mysql-plugin", "mariadb-server", "lmod", "procps", "iproute2", "git"),
    "libgomp1",  # packages of Python that bring no copy of it
    "tini",  # the first process of a namespace has to reap the orphans of all others
)

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


def cache_directory() -> Path:
    """Where this user keeps roots of Debian releases."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hpctk" / "roots"


def debian_root(
    suite: str, tell: Callable[[str], None], packages: tuple[str, ...] = PACKAGES
) -> Path:
    """Return the root of a Debian release in the user's cache; build it if it is missing.

    Of several concurrent callers one builds it; the others wait for it. ``tell`` then gets one
    line. Raises ConfigError: it cannot be built here.
    """
    directory = cache_directory()
    root = directory / f"{suite}-{recipe_digest(packages)}"
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
