"""The programs that a lab needs, and the Debian packages that provide them."""

from __future__ import annotations

import os
import shutil

from hpc_toolkit.errors import ConfigError

_ADMINISTRATORS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Directories of daemons, which are often not in an ordinary user's PATH."""

_SLURM = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "sinfo": "slurm-client",
    "scontrol": "slurm-client",
    "munged": "munge",
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


def search_path() -> str:
    """PATH, followed by the directories of daemons."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *_ADMINISTRATORS])


def program(name: str) -> str:
    """The path of a program; ConfigError if it is not installed."""
    found = shutil.which(name, path=search_path())
    if found is None:
        message = f"{name} is not installed"
        raise ConfigError(message, hint="'hpctk lab up' says which packages are missing")
    return found


def missing_programs(*, accounting: bool) -> list[str]:
    wanted = {**_SLURM, **(_ACCOUNTING if accounting else {})}
    return [name for name in wanted if shutil.which(name, path=search_path()) is None]


def install_command(missing: list[str]) -> str:
    """The command that installs programs and their plugins on Debian and Ubuntu."""
    packages = {**_SLURM, **_ACCOUNTING}
    wanted = [packages[name] for name in missing]
    if any(name in _SLURM for name in missing):
        wanted += _WITH_SLURM
    if any(name in _ACCOUNTING for name in missing):
        wanted += _WITH_ACCOUNTING
    return f"apt-get install --no-install-recommends {' '.join(dict.fromkeys(wanted))}"


def check_programs(*, accounting: bool) -> None:
    """Refuse to start without a program; the hint is the command that installs it."""
    missing = missing_programs(accounting=accounting)
    if missing:
        message = f"a lab needs programs that are not installed: {', '.join(missing)}"
        hint = f"on Debian and Ubuntu, as root: {install_command(missing)}"
        raise ConfigError(message, hint=hint)
