"""Prepare a submission from a request or a script; nothing is sent to Slurm here."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.errors import RenderError
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.client import PATIENCE_S, SlurmError
from hpc_toolkit.slurm.controller import slurm_config
from hpc_toolkit.slurm.records import script_options
from hpc_toolkit.slurm.render.directives import check_number, log_pattern
from hpc_toolkit.slurm.render.spec import TRAININGS
from hpc_toolkit.slurm.render.values import file_name, parse_array
from hpc_toolkit.slurm.sbatch import sbatch_argv
from hpc_toolkit.submit.jobs import script_copy

if TYPE_CHECKING:
    from hpc_toolkit.run import Run
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.spec import ScriptSpec
    from hpc_toolkit.slurm.render.values import Array

_MOST_CHUNKS = 1000


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    path: Path
    """Its absolute path; it is written there if neither a run nor a training keeps a copy."""
    array: str | None = None
    """Its value of ``--array``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    name: str
    scripts: tuple[Script, ...]
    log: str
    """The log in sbatch's notation, relative to ``cwd``."""
    cwd: Path
    """The jobs' directory, absolute."""
    run: Run | None = None
    """The run that the jobs work on; None for a program of its own."""
    training: Path | None = None
    """The directory of a training, absolute, which keeps its scripts and jobs as a run does."""
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Options of sbatch; they override the scripts' directives."""
    excluded: tuple[str, ...] = ()
    copies: int = 1
    chain: bool = False
    """Whether each job starts when the one before it has ended, however it ended."""
    notes: tuple[str, ...] = ()
    request: tuple[ScriptSpec, Cluster] | None = None
    """The request of the scripts, and the cluster; None for a script that is sent as it is."""

    @property
    def records(self) -> RunPaths | None:
        """Where scripts and jobs are recorded: in the run, or in the training's directory."""
        if self.run is not None:
            return self.run.paths
        return RunPaths(self.training) if self.training is not None else None

    def place(self, script: Script) -> Path:
        if self.records is None:
            return script.path
        return script_copy(self.records, self.name, script.text).absolute()

    def argv(self, script: Script, before: str = "") -> list[str]:
        """The command that submits ``script`` as the next one after job ``before``."""
        chained = [f"--dependency=afterany:{before}"] if self.chain and before else []
        # Otherwise SBATCH_JOB_NAME, or the name of the run's copy, would name the job. A job
        # whose name differs from the recorded one does not count as the run's own.
        options = [f"--job-name={self.name}", *self.options, *chained]
        return sbatch_argv(self.place(script), self.arguments, options=options)


def of_request(
    spec: ScriptSpec, cluster: Cluster, template: str, *, run: Run | None, cwd: Path
) -> Submission:
    """A submission of a request: a job or an array, or several if an index is too high for Slurm.

    Raises RenderError: the cluster cannot provide it.
    """
    from hpc_toolkit.slurm.render.kinds import training_directory
    from hpc_toolkit.slurm.render.script import render_script

    folder, notes = cwd / "slurm", []
    chunks, limit = [Chunk(spec.array or "", 0)], None
    if spec.array is not None:
        array = parse_array(spec.array, "--array")
        check_number(len(array.indices), spec, cluster)
        limit = _array_limit(cluster)
        chunks = chunks if limit is None else split_array(array, limit)
    scripts = []
    for chunk in chunks:
        part = replace(
            spec, array=chunk.array or None, array_offset=spec.array_offset + chunk.offset
        )
        suffix = f"-{chunk.offset}" if len(chunks) > 1 else ""
        path = folder / f"{file_name(spec.job_name)}{suffix}.sbatch"
        scripts.append(Script(render_script(part, cluster, template), path, part.array))
    if limit is not None and len(chunks) > 1:
        each = ", and % holds for each of them" if "%" in chunks[0].array else ""
        notes.append(
            f"{spec.array} is sent as {len(chunks)} arrays, since an index is at most "
            f"{limit - 1} here{each}"
        )
    works_in = Path(spec.chdir) if spec.chdir else cwd
    trains = template in TRAININGS and not spec.plain
    directory = works_in / training_directory(spec.run_dir, spec.job_name)
    return Submission(
        name=spec.job_name,
        scripts=tuple(scripts),
        log=log_pattern(spec),
        cwd=works_in,
        run=run,
        training=directory if trains else None,
        notes=(*notes, *_missing(spec, template, works_in)),
        request=(spec, cluster),
    )


def _missing(spec: ScriptSpec, template: str, folder: Path) -> list[str]:
    """A note if the training script does not exist; it may be created before the job starts."""
    if template not in TRAININGS or spec.container or spec.command[0] == "-m":
        return []
    path = folder / spec.command[0]
    return [] if os.path.exists(path) else [f"{path} does not exist, and the job would start it"]


def of_script(
    path: Path, text: str, *, run: Run | None, cwd: Path, training: str | None = None
) -> Submission:
    """A submission of a script as it is; its argument is ``run``, absolute if it sets ``chdir``.

    ``training`` is the directory of the training that it starts, relative to the job's directory.
    """
    found = script_options(text)
    root = ""
    if run is not None:
        root = str(run.root.absolute() if "chdir" in found else run.root)
    name = found.get("job-name") or path.name  # as sbatch names it
    plain = "slurm-%A_%a.out" if "array" in found else "slurm-%j.out"
    works_in = cwd / found.get("chdir", "")
    return Submission(
        name=name,
        scripts=(Script(text, path.absolute(), found.get("array")),),
        log=found.get("output", plain),
        cwd=works_in,
        run=run,
        training=works_in / training if training is not None else None,
        # To sbatch, a word ":" begins the next component of a heterogeneous job.
        arguments=(f"./{root}" if root == ":" else root,) if root else (),
    )


def _array_limit(cluster: Cluster) -> int | None:
    if cluster.max_array_size is not None:
        return cluster.max_array_size
    try:
        size = slurm_config(timeout_s=PATIENCE_S).get("MaxArraySize", "")
    except SlurmError:
        return None
    return int(size) if size.isdecimal() else None


class Chunk(NamedTuple):
    """One of the arrays that an array is split into; "" for a job without indices."""

    array: str
    """Its indices in sbatch's notation, each reduced by ``offset``."""
    offset: int


def split_array(array: Array, limit: int) -> list[Chunk]:
    """Split an array so that no index reaches ``limit``; it stays as it is if none does.

    The limit of elements that run at once holds for each of the arrays.

    Raises RenderError: it would take too many arrays, or ``limit`` is below 1.
    """
    if limit < 1:
        message = f"--array: this Slurm accepts no arrays (MaxArraySize is {limit})"
        raise RenderError(message, hint="submit one script N times with --jobs N")
    if array.highest < limit:
        return [Chunk(array.text, 0)]
    if array.highest // limit >= _MOST_CHUNKS:
        message = (
            f"--array: {array.text!r} makes more than {_MOST_CHUNKS} arrays of {limit} elements"
        )
        raise RenderError(message, hint="use a run: a few jobs can process any number of items")
    chunks = []
    throttle = f"%{array.at_once}" if array.at_once else ""
    for offset in range(0, array.highest + 1, limit):
        parts = [_clip(one, offset, offset + limit) for one in array.ranges]
        text = ",".join(_text(part, offset) for part in parts if part)
        if text:
            chunks.append(Chunk(f"{text}{throttle}", offset))
    return chunks


def _clip(one: range, low: int, high: int) -> range:
    """The members of ``one`` from ``low`` to below ``high``."""
    skipped = max(0, -(-(low - one.start) // one.step))
    return range(one.start + skipped * one.step, min(one.stop, high), one.step)


def _text(part: range, offset: int) -> str:
    first, last = part[0] - offset, part[-1] - offset
    if first == last:
        return str(first)
    return f"{first}-{last}" + (f":{part.step}" if part.step > 1 else "")
