"""What a job copies to its nodes' own disks before its ranks start, and how ranks find it there."""

from __future__ import annotations

import os
import shlex
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hpc_toolkit.slurm.allowlist import ENVIRONMENT, USERS
from hpc_toolkit.slurm.batch.environment import archive_environment
from hpc_toolkit.slurm.batch.job import Job
from hpc_toolkit.slurm.batch.node import StagingError
from hpc_toolkit.slurm.batch.step import Batch

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
            variable = "VIRTUAL_ENV" if _is_venv() else "CONDA_PREFIX"
            prefix = shlex.quote(sys.prefix)
            begin += _USE.format(environment=ENVIRONMENT, prefix=prefix, variable=variable)
        return begin, _LAST_LEAVES

    def copy(self, batch: Batch, run: str, *, within_s: int, nodes: Sequence[str] = ()) -> int:
        """Copy to all nodes; the exit code. The archive of the environment is beside ``run``."""
        job, environ = batch.job, os.environ
        environ.pop("HPCTK_STAGED", None)  # of a rank that submitted this job
        archive = _archive(job, Path(run).absolute().parent) if self.environment else None
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


def _is_venv() -> bool:
    return (Path(sys.prefix) / "pyvenv.cfg").exists()


def _archive(job: Job, directory: Path) -> Path | None:
    try:
        return archive_environment(
            Path(sys.prefix), directory / f".hpctk-environments-{os.geteuid()}"
        )
    except (OSError, tarfile.TarError, StagingError) as error:
        job.log(f"warning: the environment is not staged: {error}")
        return None
