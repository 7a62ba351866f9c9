"""The programs that run containers, and the command lines that start a job's ranks in an image.

A program's row says how its command line is built. All but pyxis are commands before the ranks';
pyxis is a plugin of srun, with options of srun.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from hpc_toolkit.slurm.render import refusal, setup_words
from hpc_toolkit.system.processes import WARNING_NAME, WARNING_NAMES

Gpu = Literal["", "nvidia", "amd"]

_AMD_TYPE = re.compile(r"(amd|instinct|radeon|mi\d|gfx\d|vega)", re.IGNORECASE)

CACHES = ("TMPDIR", "SLURM_TMPDIR", "SCRATCH", "HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME")
"""Variables of directories that ranks use: those of the node's disk, scratch, and caches."""

# Signals for a step reach all of its processes, and the warning ends the helpers that unpack an
# image. They ignore URG, so the warning is sent as URG, and this shell warns the program alone,
# which passes it on. Its own traps keep the shell until the program has ended.
_RELAYED = "URG"
_RELAY = (
    f'exec 3<&0; "$@" <&3 3<&- & child=$!; trap : {WARNING_NAMES} TERM; '
    f"trap 'kill -{WARNING_NAME} \"$child\"' {_RELAYED}; "
    'while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done; exit "$code"'
)
# enroot starts with the image's variables only; --env NAME copies one.
_COPY_VARIABLES = """
program=$1; shift
names=$(awk "BEGIN { for (name in ENVIRON) if (name ~ /^[A-Za-z_][A-Za-z0-9_]*\\$/) print name }")
for name in $names; do
  case $name in PATH|HOME|PWD|SHELL|_|AWK*|LD_*|ENROOT_*) ;; *) set -- "--env=$name" "$@" ;; esac
done
exec "$program" start "$@"
"""


class Program(NamedTuple):
    """How the command line of one program is built: first words, GPUs, binds, ``after``."""

    start: tuple[str, ...]
    """Words after the program, before the arguments that the cluster file gives it."""
    bind: str
    """The option of a bind; ``joint`` separates binds in one option, "" repeats the option."""
    after: tuple[str, ...]
    """The working directory and the image."""
    nvidia: tuple[str, ...] = ()
    amd: tuple[str, ...] = ()
    joint: str = ""
    pair: str = "{}:{}"
    """A bind from its two paths."""
    read_only: str = ":ro"
    refused: str = ""
    """What a path must not contain, besides ``,``, ``:`` and ``\\``."""
    space: str = " "
    """How a path is written that contains a space."""
    script: str = ""
    """A script for sh that starts the program."""
    of_srun: bool = False


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
        joint=",",
        of_srun=True,
    ),
    "enroot": Program(
        (),
        "--mount=",
        ("{image}", "sh", "-c", 'cd "$0" && exec "$@"', "{directory}"),
        nvidia=("--env=NVIDIA_VISIBLE_DEVICES=all",),
        pair="{}:{}:none:x-create=auto,rbind",
        read_only=",ro",
        refused="\t",
        space="\\040",
        script=_COPY_VARIABLES,
    ),
    "shifter": Program(
        (),
        "--volume=",
        ("--workdir={directory}", "--image={image}", "--"),
        nvidia=("--module=gpu",),
        joint=";",
        refused=";",
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
    def program(self) -> Program:
        return PROGRAMS[PurePath(self.words[0]).name]

    @property
    def of_srun(self) -> bool:
        return bool(self.words) and self.program.of_srun

    @property
    def warning(self) -> str:
        """The signal to a step that makes its ranks get the warning of the time limit."""
        return WARNING_NAME if not self.words or self.of_srun else _RELAYED

    def refused(self, path: str) -> str:
        """The characters of a path that separate paths for the program."""
        return "".join(sorted({*",:\\", *(self.program.refused if self.words else "")} & {*path}))

    def srun_options(self, *directories: str) -> list[str]:
        """Options of srun that start its tasks in the container, and show it the directories."""
        return self._command(directories) if self.of_srun else []

    def inside(self, words: list[str], *directories: str) -> list[str]:
        """The command that runs ``words`` in the container, where that is not a matter of srun."""
        if not self.words or self.of_srun:
            return words
        return ["sh", "-c", _RELAY, "container", *self._command(directories), *words]

    def _command(self, directories: Iterable[str]) -> list[str]:
        return [*self.first(self._shown(directories)), *self.last(os.getcwd())]

    def first(self, binds: Iterable[str]) -> list[str]:
        """The command up to the binds ``FROM[:TO[:ro]]``."""
        program = self.program
        gpu = {"nvidia": program.nvidia, "amd": program.amd}.get(self.gpu, ())
        start = ["sh", "-c", program.script, "sh"] if program.script else []
        name, *arguments = self.words
        given = [] if program.of_srun else [name, *program.start]
        shown = []
        for source, target, mode in map(_parts, binds):
            pair = program.pair.format(source, target).replace(" ", program.space)
            shown.append(pair + (program.read_only if mode == "ro" else ""))
        joined = [program.joint.join(shown)] if program.joint and shown else shown
        return [*start, *given, *arguments, *gpu, *(program.bind + one for one in joined)]

    def last(self, directory: str) -> list[str]:
        """The rest of the command: it starts in ``directory``."""
        return [one.format(directory=directory, image=self.image) for one in self.program.after]

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


def plain_lines(container: Container, *, gpus: bool) -> list[str]:
    """The lines of bash that make ``container`` the array of the command's first words.

    A plain script has no hpctk that looks at the node, so bash does.
    """
    program = container.program
    tmp = [] if any(_parts(one)[1] == "/tmp" for one in container.binds) else ["/tmp"]  # noqa: S108
    first = container.first([*container.binds, *tmp, _HERE])
    lines = _array("container=", first)
    pair = program.pair.format("$directory", "$directory")
    add = f'[-1]+="{program.joint}{pair}"' if program.joint else f'+=("{program.bind}{pair}")'
    lines += [
        f"for name in {' '.join(CACHES)}; do",
        "  directory=${!name-}",
        '  [[ ! -d $directory || ${container[*]} == *[=,\\;]"$directory:$directory"* ]] ||',
        f"    container{add}",
        "done",
    ]
    if gpus and not container.gpu and (program.nvidia or program.amd):
        nvidia, amd = shlex.join(program.nvidia), shlex.join(program.amd)
        lines.append(f"if [ -e /dev/kfd ]; then container+=({amd}); else container+=({nvidia}); fi")
    return [*lines, *_array("container+=", container.last(_HERE))]


_WIDTH = 100
_HERE = "\0"
"""Stands for "$PWD" in words of a plain script; no word of a user contains it."""


def _array(name: str, words: list[str]) -> list[str]:
    """An assignment of quoted words, on several lines if they need them."""
    lines = [""]
    for word in words:
        quoted = shlex.quote(word) if "," not in word else shlex.quote(f"{word} ")[:-2] + "'"
        if _HERE in word:
            quoted = '"' + re.sub(r'([\\"$`])', r"\\\1", word).replace(_HERE, "$PWD") + '"'
        if len(lines[-1]) + len(quoted) > _WIDTH and lines[-1]:
            lines.append("")
        lines[-1] += f" {quoted}" if lines[-1] else quoted
    if len(lines) == 1:
        return [f"{name}({lines[0]})"]
    return [f"{name}(", *(f"  {line}" for line in lines), ")"]
