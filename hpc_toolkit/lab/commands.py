"""The programs of a lab, and commands that run against it.

A command reaches no other Slurm, and is killed if it takes too long.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.lab.settings import LabPaths
from hpc_toolkit.slurm.client import Finished, SlurmSilentError
from hpc_toolkit.slurm.client import run as run_program

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
