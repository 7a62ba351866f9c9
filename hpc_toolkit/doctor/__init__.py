"""Examine a directory, from the first file created in it to the last one removed.

The lead examines. The other side carries out its requests through its own path to the directory: a
child of the lead, or the second task of a Slurm step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit import __version__
from hpc_toolkit.doctor import filesystem, locks, node, sides
from hpc_toolkit.doctor.runfiles import Repair, check_run, plan_repairs
from hpc_toolkit.errors import ConfigError, HpcToolkitError, RunError
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.rundir.trust import Mount, believed, is_local, mount_of, write_proof
from hpc_toolkit.system.quantities import first_names
from hpc_toolkit.system.ranks import in_step

if TYPE_CHECKING:
    from hpc_toolkit.system.clock import Clock

ARRIVAL_S = 20.0
STEP_ARRIVAL_S = 180.0
"""Tasks of one step may start minutes apart on a busy cluster."""
_GOES_WITHIN_S = 1.0
_NO_TROUBLE = (sides.Verdict.FINE, sides.Verdict.SKIPPED)
_PAIR_IT = "'srun -N2 --ntasks-per-node=1 hpctk doctor DIR', or --pair with a second mount"


class Partner:
    def __init__(self, area: Path) -> None:
        self._area = area
        self._holder: locks.Holder | None = None
        self._changes: filesystem.Changes | None = None

    def serve(self, *, arrival_s: float) -> None:
        """Answer the lead's requests until it ends the examination, or is silent."""
        channel = sides.Channel(self._area, sides.OTHER, sides.LEAD)
        channel.connect(arrival_s)
        number, act = 0, ""
        try:
            while act != sides.BYE:
                number += 1
                asked = channel.receive(number, sides.ANSWER_S)
                act = asked.pop("act")
                channel.send(number, self._answer(act, asked))
        finally:
            self._let_go()

    def _answer(self, act: str, words: dict[str, Any]) -> dict[str, Any]:
        acts: dict[str, Callable[..., Any]] = {
            "where": lambda: asdict(sides.side_of(self._area.parent)),
            "race": lambda own: filesystem.race(self._area / "race", own),
            "prepare": self._prepare,
            "change": self._change,
            "hold": self._hold,
            "let_go": self._let_go,
            "try": lambda name: locks.try_lock(self._area / name),
            "devices": node.look_at_gpus,
            sides.BYE: os.getpid,
        }
        try:
            return {"answer": acts[act](**words)}
        except OSError as error:
            told = {"errno": error.errno or 0, "error": error.strerror or str(error)}
            return {**told, "path": str(error.filename) if error.filename else None}

    def _prepare(self, name: str) -> None:
        self._changes = filesystem.Changes(self._area / name)

    def _change(self) -> None:
        assert self._changes is not None
        self._changes.make()

    def _hold(self, name: str) -> str:
        self._holder = locks.Holder(self._area / name)
        return self._holder.outcome

    def _let_go(self) -> None:
        if self._holder is not None:
            self._holder.kill()
            self._holder = None


@dataclass(frozen=True, slots=True)
class Step:
    token: str
    """Identifier that both tasks share, and that no other step has."""
    leads: bool
    """Whether this task examines and reports."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Step | None:
        """Return the step of this process; None outside a step, or in a step of one task."""
        if not in_step(environ):
            return None
        tasks = environ.get("SLURM_NTASKS", "")
        if tasks == "1":
            return None
        if tasks != "2":
            message = f"this step has {tasks or 'an unknown number of'} tasks; doctor needs two"
            raise ConfigError(message, hint="srun -N2 --ntasks-per-node=1 hpctk doctor DIR")
        keys = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        token = "-".join(environ.get(key) or "0" for key in keys)
        return cls(re.sub(r"[^A-Za-z0-9-]", "-", token), environ.get("SLURM_PROCID") == "0")


def join_step(directory: Path, step: Step) -> None:
    """Act as the second task of a step: carry out the requests of the first one, which reports."""
    try:
        area = sides.make_area(directory, step.token, sides.OTHER)
    except OSError as error:
        message = f"cannot write to {directory}: {error.strerror}"
        raise RunError(message, hint="both nodes must see the directory and may write") from error
    try:
        Partner(area).serve(arrival_s=STEP_ARRIVAL_S)
    except sides.SilentSideError:
        # In all other cases the first task removes the area.
        sides.remove_area(area)
        raise


@contextmanager
def helper(root: Path, area: Path) -> Iterator[None]:
    """Have the other side as a child, which uses ``root``, a path to the directory of ``area``."""
    _check_same(root, area, root / area.name)
    token = area.name.rpartition("doctor-")[2]
    child = sides.Child(
        lambda: Partner(sides.make_area(root, token, sides.OTHER)).serve(arrival_s=ARRIVAL_S)
    )
    try:
        yield
        with suppress(TimeoutError, OSError):
            child.answer(_GOES_WITHIN_S)
    finally:
        child.end()


def _check_same(root: Path, area: Path, twin: Path) -> None:
    """Check by mkdir that both paths lead to one directory: a lookup might only ask a cache."""
    try:
        twin.mkdir()
    except FileExistsError:
        return
    except OSError as error:
        message = f"cannot write to {root}: {error.strerror}"
        raise ConfigError(message, hint="--pair names another mount of the directory") from error
    with suppress(OSError):
        twin.rmdir()
    message = f"{root} is not {area.parent} through another mount"
    raise ConfigError(message, hint="--pair names another mount of the directory")


def examine(
    directory: Path,
    clock: Clock,
    *,
    other: Path | None = None,
    step: Step | None = None,
    around: bool = False,
) -> sides.Report:
    """Examine a directory, and the run in it if it is one; remove all files that it creates.

    The result is stored in the run if the two sides stand for two hosts. ``other`` is the same
    directory through another mount of this machine, ``step`` that of this task, whose other task
    calls :func:`join_step`, and ``around`` whether to examine Slurm and GPUs as well.

    Raises ConfigError: ``other`` is another directory; RunError: the other side did not arrive, or
    stopped answering.
    """
    mount, local = mount_of(directory), is_local(directory)
    means = "a run here is for processes of this machine" if local else ""
    where = f"{mount.kind}, {mount.source} at {mount.point}"
    found = [
        sides.fine("filesystem", where, means),
        filesystem.check_mount(mount),
        *filesystem.check_space(directory),
    ]
    report = sides.Report(str(directory), found)
    around_it: list[sides.Finding] = []
    token = step.token if step is not None else os.urandom(6).hex()
    try:
        with locks.waiting_for_server(mount):
            area = sides.make_area(directory, token, sides.LEAD)
    except OSError as error:
        text = f"cannot make a directory in {directory}: {error.strerror}"
        means = "no worker can work here; the other checks were skipped"
        fix = "check the owner, the permissions, the mount and the quota"
        found.append(sides.Finding("writing", sides.Verdict.UNSAFE, text, means, fix))
    else:
        try:
            # The other side is the second task of the step, else a child of this process.
            with helper(other or directory, area) if step is None else nullcontext():
                pair = sides.Pair(area, arrival_s=ARRIVAL_S if step is None else STEP_ARRIVAL_S)
                paired = other is not None or step is not None
                found.append(_check_sides(pair, paired=paired, local=local))
                _check_pair(report, pair, mount)
                if around:
                    # Two tasks on one node see the same devices.
                    nodes = step is not None and pair.here.host != pair.there.host
                    around_it += node.check_devices(pair, nodes=nodes)
                pair.ask(sides.BYE)
        finally:
            sides.remove_area(area)
    of_directory = list(found)
    found += around_it
    if around:
        found.append(node.check_slurm())
    if RunPaths(directory).manifest.exists():
        found += _look_at_run(directory, report, of_directory, clock)
    return report


def _look_at_run(
    directory: Path, report: sides.Report, of_directory: list[sides.Finding], clock: Clock
) -> list[sides.Finding]:
    paths, found = RunPaths(directory), []
    if report.apart:
        try:
            _keep(report, of_directory, paths, clock)
        except OSError as error:
            found.append(_failed("doctor.json", error))
    try:
        found += [_how_deaths_are_seen(paths), *check_run(directory)]
        with suppress(HpcToolkitError):  # an unreadable run.json, which check_run has reported
            found += map(_missing, plan_repairs(directory).repairs)
    except HpcToolkitError as error:
        means = "commands end there, and the files below it are not reachable"
        found.append(sides.Finding("run", sides.Verdict.UNSAFE, error.message, means, error.hint))
    except OSError as error:
        found.append(_failed("run", error))
    return found


def _missing(repair: Repair) -> sides.Finding:
    known = "" if repair.kind == "directory" else ", and journals tell whose they were"
    fix = "'hpctk doctor RUN --repair' makes them again"
    found = f"missing{known}: {first_names(repair.names)}"
    return sides.Finding("to repair", sides.Verdict.UNSAFE, found, repair.why, fix)


def _check_pair(report: sides.Report, pair: sides.Pair, mount: Mount) -> None:
    """Make all checks of the directory that need two sides."""
    report.sides, report.apart = (pair.here, pair.there), pair.apart

    def views() -> list[sides.Finding]:
        report.delays_s = filesystem.measure_delays(pair)
        return list(starmap(filesystem.judge_delay, report.delays_s.items()))

    def trial() -> list[sides.Finding]:
        findings, excludes = locks.check_locks(pair, mount)
        report.locks_proven = pair.apart and excludes
        return findings

    checks: dict[str, Callable[[], list[sides.Finding]]] = {
        "exclusive names": lambda: filesystem.check_names(pair),
        "delays": views,
        "locks": trial,
        "fsync": lambda: [filesystem.check_writing(pair.area)],
    }
    for name, check in checks.items():
        try:
            report.findings += check()
        except OSError as error:
            report.findings.append(_failed(name, error))


def _check_sides(pair: sides.Pair, *, paired: bool, local: bool) -> sides.Finding:
    here, there = pair.here, pair.there
    who = f"{here.host} alone"
    if here.host != there.host:
        who = " and ".join(sorted((here.host, there.host)))
    if pair.apart:
        return sides.fine("sides", f"{who}: {here.mount.point} and {there.mount.point}")
    if local and not paired:
        return sides.fine("sides", who)
    through = ": both sides use one mount of one kernel" if paired else ", through one mount"
    means = "whether other hosts see the same files and locks was not checked"
    return sides.Finding("sides", sides.Verdict.UNKNOWN, f"{who}{through}", means, _PAIR_IT)


def _keep(report: sides.Report, found: list[sides.Finding], paths: RunPaths, clock: Clock) -> None:
    """Store the result for workers, which read it at their start, and for users of the run."""
    limit_s, seen_after_s = filesystem.LIMIT_S, report.delays_s.values() or [0.0]
    record = {
        "at": round(clock.wall(), 3),
        "hpctk": __version__,
        "verdict": sides.worst(found),
        "troubles": [asdict(one) for one in found if one.verdict not in _NO_TROUBLE],
        "locks_proven": report.locks_proven,
        "delays_s": report.delays_s,
        "least_lease_s": 2 * max(limit_s if one is None else one for one in seen_after_s),
        "sides": [asdict(side) for side in report.sides],
    }
    write_proof(paths.doctor, record)


def _how_deaths_are_seen(paths: RunPaths) -> sides.Finding:
    check = "deaths"
    if believed(paths).locks:
        found = "on other hosts by a free lock, after a missed heartbeat"
        means = (
            "workers that start from now on use it: locks were proven for this filesystem; "
            f"{filesystem.LOST_HOSTS}"
        )
        return sides.fine(check, found, means)
    found = "on other hosts by the lease, 180 s by default"
    if is_local(paths.root):
        return sides.fine(check, found)
    means = "the unit of a lost worker waits for that long, unless Slurm speaks sooner"
    fix = f"where locks reach other hosts, prove it: {_PAIR_IT}"
    return sides.Finding(check, sides.Verdict.SLOWER, found, means, fix)


def _failed(check: str, error: OSError) -> sides.Finding:
    where = f" ({os.path.basename(error.filename)})" if isinstance(error.filename, str) else ""
    found = f"failed: {error.strerror or error}{where}"
    means = "a worker that meets this ends, and its items wait for others"
    fix = "try again; if it stays, ask the site, or choose another directory"
    return sides.Finding(check, sides.Verdict.UNSAFE, found, means, fix)
