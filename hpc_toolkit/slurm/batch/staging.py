"""What a job copies to its nodes' own disks before its ranks start, and how ranks find it there.

Importing from a network filesystem costs each process some requests for each file. An archive of
the Python environment is one file, which each node reads once from its beginning to its end.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, NoReturn

from hpc_toolkit.rundir.files import replacing_file
from hpc_toolkit.slurm.batch.node import StagingError, check_room
from hpc_toolkit.slurm.render import ENVIRONMENT, USERS
from hpc_toolkit.system.quantities import format_size

if TYPE_CHECKING:
    from hpc_toolkit.slurm.batch.job import Batch, Job

_FIND = """HPCTK_STAGED=$HPCTK_STAGED/$SLURMD_NODENAME
hpctk_user=$HPCTK_STAGED/{users}/$SLURM_LOCALID
"""
# The directory of another user is not to be trusted. Tasks that were not counted register here; it
# fails if the copies are incomplete, or are being removed by the last task.
_USE = """hpctk_copy=$HPCTK_STAGED/{environment}; hpctk_prefix={prefix}
if [ -O "${{HPCTK_STAGED%/*}}" ] && [ -O "$HPCTK_STAGED" ] && [ -d "$hpctk_copy" ] &&
  {{ mkdir "$hpctk_user" || [ -d "$hpctk_user" ]; }} 2>/dev/null; then
  export {variable}="$hpctk_copy" PATH="$hpctk_copy/bin:$PATH"
  case $1 in "$hpctk_prefix"/*)
    hpctk_word=$hpctk_copy${{1#"$hpctk_prefix"}}; shift; set -- "$hpctk_word" "$@";;
  esac
fi
"""
_LAST_LEAVES = """if { rmdir "$hpctk_user" && rmdir "${hpctk_user%/*}"; } 2>/dev/null; then
  rm -rf "$HPCTK_STAGED"; rmdir "${HPCTK_STAGED%/*}" 2>/dev/null
fi
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    paths: tuple[str, ...] = ()
    environment: bool = False
    """Whether this interpreter's environment is copied too, where that works."""
    directory: str = ""
    """Where to; "" for the job's directory on the node's disk."""
    tasks: int = 1
    """Tasks of a node, which all use its copies of the paths."""

    def around(self) -> tuple[str, str]:
        """What a task's shell does before and after its program, which are its arguments."""
        if not (self.paths or self.environment):
            return "", ""
        begin = _FIND.format(users=USERS)
        for number in range(1, len(self.paths) + 1):
            begin += f"HPCTK_STAGED_{number}=$HPCTK_STAGED/$HPCTK_STAGED_{number}\n"
        if self.environment:
            is_venv = (Path(sys.prefix) / "pyvenv.cfg").exists()
            variable = "VIRTUAL_ENV" if is_venv else "CONDA_PREFIX"
            prefix = shlex.quote(sys.prefix)
            begin += _USE.format(environment=ENVIRONMENT, prefix=prefix, variable=variable)
        return begin, _LAST_LEAVES

    def copy(self, batch: Batch, run: str, *, within_s: int, nodes: Sequence[str] = ()) -> int:
        """Copy to all nodes; the exit code. The archive of the environment is beside ``run``."""
        job, environ = batch.job, os.environ
        environ.pop("HPCTK_STAGED", None)  # of a rank that submitted this job
        archive = _own_archive(job, Path(run).absolute().parent) if self.environment else None
        if not self.paths and archive is None:
            return 0
        disk = self.directory or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or "/tmp"  # noqa: S108
        place = f"{disk}/hpctk-{job.id}.{job.restarts}"
        words = [sys.executable, "-Pm", "hpc_toolkit", "stage", place, "--users"]
        words.append(str(self.tasks if self.paths else 0))
        words += ["--environment", str(archive)] if archive else []
        # Where ranks never start, nobody else removes the copies; ranks that start remove them.
        remove = batch.once_per_node("--quiet", "--time=5", nodes=nodes)
        quiet = ["sh", "-c", '"$@" 2>/dev/null || :', "sh"]  # a node may be lost or given back
        batch.cleanup.insert(0, [*quiet, *remove, "rm", "-rf", "--", place])
        environ["HPCTK_STAGED"] = place
        for number, path in enumerate(self.paths, 1):
            environ[f"HPCTK_STAGED_{number}"] = PurePosixPath(path).name
        node = batch.once_per_node(within_s=within_s, nodes=nodes)
        code = batch.call([*node, *words, "--", *self.paths])
        if code and not self.paths:
            job.log("warning: a node uses the environment where it is: see above")
        return code


NO_STAGING = Staging()


def _own_archive(job: Job, directory: Path) -> Path | None:
    place = directory / f".hpctk-environments-{os.geteuid()}"
    try:
        return archive_environment(Path(sys.prefix), place)
    except (OSError, tarfile.TarError, StagingError) as error:
        job.log(f"warning: the environment is not staged: {error}")
        return None


_PACKAGES = (".dist-info", ".egg-info", ".egg-link", ".pth")
_OF_CONDA = frozenset({"envs", "pkgs"})
"""Other environments and downloads in the directory of a base environment."""
_BLOCK = 1 << 20
"""NFS clients wait when a page is written in several parts."""
_TRIAL = "import sys; print(sys.prefix)"


def archive_environment(prefix: Path, directory: Path) -> Path:
    """Return an archive of the environment as it is now, made in ``directory`` if need be.

    Archives of its earlier states are removed. Raises OSError, StagingError.
    """
    if not any((prefix / one).exists() for one in ("pyvenv.cfg", "conda-meta")):
        raise StagingError(f"{prefix} is neither a virtual environment nor one of conda")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    # Ranks run what is in the archive.
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise StagingError(f"{directory} can be changed by other users")
    if directory.resolve().is_relative_to(prefix.resolve()):
        raise StagingError(f"{directory} is inside of the environment")
    stem, state = _digest(str(prefix)), _state(prefix)
    archive = directory / f"{stem}-{state}.tar"
    if not archive.exists():
        _archive(prefix, archive)
        if _state(prefix) != state:
            archive.unlink(missing_ok=True)
            raise StagingError(f"{prefix} was changed while it was archived")
    # Drafts of killed jobs too. A job that still writes one will find the archive.
    for other in directory.glob(f"*{stem}-*"):
        if other != archive:
            other.unlink(missing_ok=True)
    return archive


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def _state(prefix: Path) -> str:
    """A key that changes when a package is installed, updated or removed."""
    entries = (*prefix.glob("lib*/python*/site-packages/*"), *prefix.glob("conda-meta/*.json"))
    named = (path for path in entries if path.suffix in (*_PACKAGES, ".json"))
    return _digest("\n".join(sorted(f"{path}:{path.stat().st_mtime_ns}" for path in named)))


def _archive(prefix: Path, archive: Path) -> None:
    try:
        with replacing_file(archive) as file:
            _write(prefix, file)
    except OSError:
        # The job that was first has removed this one's draft.
        if not archive.exists():
            raise


def _write(prefix: Path, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w|", bufsize=_BLOCK, format=tarfile.GNU_FORMAT) as tar:
        for path in _below(prefix):
            # Python processes write .pyc files meanwhile, under other names first.
            with suppress(FileNotFoundError):
                tar.add(path, os.path.relpath(path, prefix), recursive=False, filter=_archived)


def _below(prefix: Path) -> Iterator[str]:
    def fail(error: OSError) -> NoReturn:
        raise error

    for root, directories, files in os.walk(prefix, onerror=fail):
        if root == str(prefix):
            directories[:] = [one for one in directories if one not in _OF_CONDA]
        yield from (os.path.join(root, name) for name in (*directories, *files))


def _archived(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return member if member.isfile() or member.isdir() or member.issym() or member.islnk() else None


def stage_environment(archive: Path, directory: Path) -> str:
    """Extract the archive of this interpreter's environment; return a line for the log.

    Ranks find no environment in ``directory`` if it does not work there, and use the original.
    """
    started, copy = time.monotonic(), directory / ENVIRONMENT
    try:
        size = archive.stat().st_size
        check_room(size, directory)
        _extract(archive, copy)
        _check(copy, Path(sys.executable).relative_to(sys.prefix))
    except (OSError, ValueError, tarfile.TarError, StagingError) as error:
        if copy.exists():
            shutil.rmtree(copy)
        return f"warning: the environment is not staged: {error}"
    return f"staged the environment: {format_size(size)} in {time.monotonic() - started:.1f} s"


def _extract(archive: Path, copy: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise StagingError("this Python cannot refuse unsafe members; 3.11.4 and newer can")
    copy.mkdir(mode=0o700)
    if os.statvfs(copy).f_flag & os.ST_NOEXEC:
        raise StagingError(f"{copy} is mounted noexec")
    with tarfile.open(archive, "r|", bufsize=_BLOCK) as tar:
        tar.extractall(copy, filter=_extracted)  # noqa: S202 - the filter refuses unsafe ones
    _move_scripts(copy / "bin", sys.prefix, str(copy))


def _extracted(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    # bin/python of a virtual environment is a link to another directory. Both filters refuse
    # members that would be written outside of the target, through links too.
    return (tarfile.tar_filter if member.issym() else tarfile.data_filter)(member, path)


def _check(copy: Path, python: Path) -> None:
    """Raise StagingError if the copy's interpreter does not start, or is that of another place."""
    done = subprocess.run(
        [copy / python, "-Pc", _TRIAL], check=False, capture_output=True, text=True
    )
    if done.returncode or Path(done.stdout.strip()).resolve() != copy.resolve():
        raise StagingError(f"its interpreter does not work in {copy}: {done.stderr.strip()}")


def _move_scripts(directory: Path, old: str, new: str) -> None:
    """Replace the prefix in scripts: in their first lines, and in bin/activate."""
    named = re.compile(rb"(?<![\w./-])" + re.escape(os.fsencode(old)) + rb"(?![\w.-])")
    for path in directory.iterdir():
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("r+b") as file:
            text = file.read(4096)
            if b"\0" in text:
                continue
            text += file.read()
            file.seek(0)
            file.write(named.sub(lambda _: os.fsencode(new), text))
            file.truncate()
