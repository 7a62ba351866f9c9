"""The programs that run containers, and the command lines that start a job's ranks in an image.

A program's row says how its command line is built. All but pyxis are commands before the ranks';
pyxis is a plugin of srun, with options of srun.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from hpc_toolkit.slurm.allowlist import refusal, setup_words
from hpc_toolkit.system.processes import WARNING_NAME

Gpu = Literal["", "nvidia", "amd"]

_AMD_TYPE = re.compile(r"(amd|instinct|radeon|mi\d|gfx\d|vega)", re.IGNORECASE)

CACHES = ("TMPDIR", "SLURM_TMPDIR", "SCRATCH", "HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME")
"""Variables of directories that ranks use: those of the node's disk, scratch, and caches."""

# Signals for a step reach all of its processes, and the warning ends the helpers that unpack an
# image. They ignore URG, so the warning is sent as URG, and this shell warns the program alone,
# which passes it on. Its own traps keep the shell until the program has ended.
_RELAYED = "URG"
_RELAY = (
    f'exec 3<&0; "$@" <&3 3<&- & child=$!; trap : {WARNING_NAME} TERM; '
    f"trap 'kill -{WARNING_NAME} \"$child\"' {_RELAYED}; "
    'while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done; exit "$code"'
)


class Program(NamedTuple):
    """How the command line of one program is built: first words, GPUs, binds, ``after``."""

    start: tuple[str, ...]
    """Words after the program, before the arguments that the cluster file gives it."""
    bind: str
    """The option of a bind."""
    after: tuple[str, ...]
    """The working directory and the image."""
    nvidia: tuple[str, ...] = ()
    amd: tuple[str, ...] = ()
    of_srun: bool = False
    """Whether these are options of srun, where one option has all binds."""


_APPTAINER = Program(
    ("exec",), "--bind=", ("--pwd={directory}", "{image}"), nvidia=("--nv",), amd=("--rocm",)
)
# The host's namespaces: ranks of a node find each other, and hpctk finds its nodes and processes.
_PODMAN = Program(
    (
        *("run", "--rm", "--env-host", "--network=host", "--uts=host", "--pid=host", "--ipc=host"),
        *("--user=0", "--entrypoint=", "--security-opt=label=disable"),
    ),
    "--volume=",
    ("--workdir={directory}", "{image}"),
    nvidia=("--device=nvidia.com/gpu=all",),
    amd=("--device=/dev/kfd", "--device=/dev/dri", "--group-add=keep-groups"),
)
PROGRAMS: dict[str, Program] = {
    "apptainer": _APPTAINER,
    "singularity": _APPTAINER,
    "pyxis": Program(
        (),
        "--container-mounts=",
        ("--container-workdir={directory}", "--container-image={image}"),
        of_srun=True,
    ),
    "podman-hpc": _PODMAN._replace(nvidia=("--gpu",)),
    "podman": _PODMAN,
}


def program_words(value: object, where: str) -> tuple[str, ...]:
    """Read a program of the table, as a name or a path, and its arguments. Raises RenderError."""
    words = setup_words(value, where)
    if PurePath(words[0]).name not in PROGRAMS:
        raise refusal(where, value, f"one of {', '.join(PROGRAMS)}, a path of it, with arguments")
    return tuple(words)


def gpu_of_type(gpu_type: str | None) -> Gpu:
    """The maker of GPUs that Slurm calls ``gpu_type``; "" leaves it to the node."""
    return "amd" if _AMD_TYPE.match(gpu_type or "") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container image, and what its ranks see of the node; by default they run without one."""

    words: tuple[str, ...] = ()
    """The program that runs it, as a name or a path, and its arguments."""
    image: str = ""
    binds: tuple[str, ...] = ()
    """Directories, ``FROM[:TO[:ro]]``."""
    gpu: Gpu = ""
    """The maker of the GPUs that it shows; "" shows none."""

    @property
    def program(self) -> Program | None:
        return PROGRAMS[PurePath(self.words[0]).name] if self.words else None

    @property
    def warning(self) -> str:
        """The signal to a step that makes its ranks get the warning of the time limit."""
        return WARNING_NAME if self.program is None or self.program.of_srun else _RELAYED

    def refused(self, path: str) -> str:
        """The characters of a path that separate paths for the program."""
        return "".join(sorted({*",:\\"} & {*path}))

    def srun_options(self, *directories: str) -> list[str]:
        """Options of srun that start its tasks in the container, and show it the directories."""
        of_srun = self.program is not None and self.program.of_srun
        return self._command(directories) if of_srun else []

    def inside(self, words: list[str], *directories: str) -> list[str]:
        """The command that runs ``words`` in the container, where that is not a matter of srun."""
        if self.program is None or self.program.of_srun:
            return words
        return ["sh", "-c", _RELAY, "container", *self._command(directories), *words]

    def _command(self, directories: Iterable[str]) -> list[str]:
        program = self.program
        assert program is not None
        gpu = {"nvidia": program.nvidia, "amd": program.amd}.get(self.gpu, ())
        name, *arguments = self.words
        given = [] if program.of_srun else [name, *program.start]
        parts = map(_parts, self._shown(directories))
        shown = [f"{source}:{target}{':ro' * (mode == 'ro')}" for source, target, mode in parts]
        binds = [",".join(shown)] if program.of_srun else shown
        after = [one.format(directory=os.getcwd(), image=self.image) for one in program.after]
        return [*given, *arguments, *gpu, *(program.bind + one for one in binds), *after]

    def _shown(self, directories: Iterable[str]) -> list[str]:
        """The binds, and directories under their own names: given, current, of files and caches."""
        given = {_parts(one)[1]: one for one in self.binds}
        own = [os.getcwd(), *directories]
        caches = [one for one in _used() if one not in own and not self.refused(one)]
        names = dict.fromkeys(one for one in (*caches, *own) if one not in given)
        # A directory below another one is seen there.
        outer = [one for one in names if not any(one.startswith(f"{up}/") for up in names)]
        return [*outer, *given.values()]


NO_CONTAINER = Container()


def _used() -> list[str]:
    """Directories of this node that ranks use for their files, as far as they exist."""
    environ = os.environ
    named = ["/tmp", *(environ.get(name, "") for name in CACHES)]  # noqa: S108 - the node's
    if not environ.get("XDG_CACHE_HOME"):
        named.append(os.path.expanduser("~/.cache"))
    return [one.rstrip("/") for one in named if one.startswith("/") and os.path.isdir(one)]


def _parts(bind: str) -> tuple[str, str, str]:
    source, _, rest = bind.partition(":")
    target, _, mode = rest.partition(":")
    return source, target or source, mode


def environment_of(python: str) -> tuple[str, ...]:
    """The virtual environment of an interpreter, if it lies on this node: the image has none."""
    home = PurePath(python).parent.parent
    return (str(home),) if Path(home, "pyvenv.cfg").is_file() else ()


def node_gpu() -> Gpu:
    """The maker of this node's GPUs."""
    amd = os.path.exists("/dev/kfd") and not os.path.exists("/dev/nvidiactl")
    return "amd" if amd else "nvidia"
