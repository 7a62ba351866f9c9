"""The programs of a lab, of this machine or of a root, and commands that run against it.

A command reaches no other Slurm, and is killed if it takes too long.

A root is the directory tree of a distribution with another Slurm than this machine's. A process
that enters it sees the root's programs and settings (/usr, /etc, /opt, /var), and the machine's
files everywhere else. It writes to a layer in memory above the root, so any number of processes can
use a root at once, none changes it, and nothing is left of them, even if they are killed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.lab.settings import LabPaths
from hpc_toolkit.slurm.client import Finished, SlurmSilentError
from hpc_toolkit.slurm.client import run as run_program
from hpc_toolkit.system.installation import OF_USER

HOSTS = Path("/etc/hosts")
_ADMINISTRATORS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Directories of daemons, which are often not in an ordinary user's PATH."""

_SLURM = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "sinfo": "slurm-client",
    "scontrol": "slurm-client",
    "munged": "munge",
}
_SYSTEM = {
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
_ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "sacctmgr": "slurm-client",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
# Packages of plugins: an installed program does not imply its plugins.
_WITH_SLURM = ("slurm-wlm-basic-plugins",)
_WITH_ACCOUNTING = ("slurm-wlm-mysql-plugin",)

CLIENTS = (
    "sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "scrontab",
    "sdiag", "sinfo", "sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger",
)  # fmt: skip
"""Slurm's commands for users."""

ANSWER_S = 30.0
"""Seconds for a query. Slurm's programs retry by themselves for about 10 s."""
# Variables of an outer Slurm, or options meant for it, would change commands for the lab.
_FOREIGN = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_",
    "SCONTROL_", "PMI_", "PMIX_",
)  # fmt: skip


def user_path() -> list[str]:
    """The directories in PATH, without those of labs: their scripts would enter another lab."""
    every = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return [one for one in every if not os.path.exists(f"{one}/../lab.json")]


def search_path() -> str:
    """PATH, followed by the directories of daemons."""
    return os.pathsep.join([*user_path(), *_ADMINISTRATORS])


def program(name: str, paths: LabPaths | None = None) -> str:
    """The path of a program, or of a lab's script that runs it; ConfigError if it is missing."""
    own = [str(paths.clients)] if paths is not None else []
    found = shutil.which(name, path=os.pathsep.join([*own, search_path()]))
    if found is None:
        message = f"{name} is not installed"
        raise ConfigError(message, hint="'hpctk lab up' says which packages are missing")
    return found


def missing_programs(*, accounting: bool, root: str = "") -> list[str]:
    """Programs that a lab lacks; those of Slurm are looked for in ``root``."""
    slurm = {**_SLURM, **(_ACCOUNTING if accounting else {})}
    path = search_path().split(os.pathsep)

    def is_there(name: str) -> bool:
        # A link in a root may be absolute, so that only a process in the root can follow it.
        where = root if name in slurm else ""
        return any(os.path.lexists(f"{where}{directory}/{name}") for directory in path)

    return [name for name in (*slurm, *_SYSTEM) if not is_there(name)]


def install_command(missing: list[str]) -> str:
    """The command that installs programs and their plugins on Debian and Ubuntu."""
    packages = {**_SLURM, **_SYSTEM, **_ACCOUNTING}
    wanted = [packages[name] for name in missing]
    if any(name in _SLURM for name in missing):
        wanted += _WITH_SLURM
    if any(name in _ACCOUNTING for name in missing):
        wanted += _WITH_ACCOUNTING
    return f"apt-get install --no-install-recommends {' '.join(dict.fromkeys(wanted))}"


def check_programs(*, accounting: bool, root: str = "") -> None:
    """Refuse to start without a program; the hint is the command that installs it."""
    missing = missing_programs(accounting=accounting, root=root)
    if missing:
        where = f"not in {root}" if root else "not installed"
        message = f"a lab needs programs that are {where}: {', '.join(missing)}"
        hint = f"on Debian and Ubuntu, as root: {install_command(missing)}"
        if root:
            hint = "--slurm takes a directory with usr, etc and an installed Slurm"
        raise ConfigError(message, hint=hint)
    # Minimal containers have none, and each node of a lab covers it with a file of its own.
    if not HOSTS.exists():
        message = f"a lab needs {HOSTS}, which this machine does not have"
        raise ConfigError(message, hint=f"as root: echo 127.0.0.1 localhost >{HOSTS}")


def environment(paths: LabPaths) -> dict[str, str]:
    own = {key: text for key, text in os.environ.items() if not key.startswith(_FOREIGN)}
    return {**own, "PATH": os.pathsep.join(user_path()), "SLURM_CONF": str(paths.slurm_conf)}


def finished(
    paths: LabPaths,
    *argv: str,
    environ: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> Finished:
    """Run a command to its end, by default a Slurm command against the lab.

    Kills its process group after ``limit_s``, by default 30 s, e.g. because a daemon is stopped.
    """
    given = environment(paths) if environ is None else environ
    words = [program(argv[0], paths), *argv[1:]]
    try:
        return run_program(words, timeout_s=limit_s or ANSWER_S, environ=given)
    except SlurmSilentError as error:
        message = error.message.replace(words[0], argv[0])
        raise HpcToolkitError(message, hint=f"the lab's logs are in {paths.logs}") from None


def ask(paths: LabPaths, *argv: str, limit_s: float | None = None) -> str:
    """Run a Slurm command against the lab and return its stdout."""
    done = finished(paths, *argv, limit_s=limit_s)
    if done.code != 0:
        message = " ".join(done.stderr.split()) or f"{argv[0]} failed"
        raise HpcToolkitError(message, hint=f"the lab's logs are in {paths.logs}")
    return done.stdout


def node_states(paths: LabPaths) -> dict[str, str]:
    """Return the state of every node in sinfo's terms; {} while slurmctld does not answer."""
    try:
        text = ask(paths, "sinfo", "-h", "-N", "-p", "main", "-o", "%N %T")
    except HpcToolkitError:
        return {}
    return dict(line.split() for line in text.splitlines())


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
