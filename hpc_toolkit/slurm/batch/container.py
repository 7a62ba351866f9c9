"""How a job's tasks get into their container."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from hpc_toolkit.slurm.batch.job import JobError

Runtime = Literal["", "apptainer", "pyxis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container image, and the directories that it shows."""

    runtime: Runtime = ""
    """What runs it; "" for no container."""
    image: str = ""
    """A file, or ``docker://name:tag``."""
    binds: tuple[str, ...] = ()
    """More directories, ``FROM[:TO[:ro]]``."""
    gpus: bool = False
    """Whether it shows the GPUs of its node."""

    def check(self, *directories: str) -> None:
        """Raise JobError unless the container can show these directories."""
        for directory in directories if self.runtime else ():
            if any(letter in directory for letter in ",:\\"):
                msg = f"no container can be shown {directory}: ',', ':' and '\\' separate paths"
                raise JobError(msg, hint="use a directory whose path has none of them")

    def srun_options(self, *directories: str) -> list[str]:
        """Options of srun that start its tasks in the container: pyxis is a plugin of srun."""
        if self.runtime != "pyxis":
            return []
        shown = [os.getcwd(), *directories, *self.binds]
        # pyxis takes a lone path for a volume.
        mounts = ",".join(one if ":" in one else f"{one}:{one}" for one in shown)
        return [
            f"--container-image={self.image}",
            f"--container-workdir={os.getcwd()}",
            f"--container-mounts={mounts}",
        ]

    def inside(self, words: list[str], *directories: str) -> list[str]:
        """The command that runs ``words`` in the container: apptainer is a program."""
        if self.runtime != "apptainer":
            return words
        argv = ["apptainer", "exec", *(["--nv"] if self.gpus else [])]
        for directory in (*self.binds, os.getcwd(), *directories):
            argv += ["--bind", directory]
        return [*argv, "--pwd", os.getcwd(), self.image, *words]


NO_CONTAINER = Container()
