"""Examine a directory, from the first file created in it to the last one removed."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hpc_toolkit import __version__
from hpc_toolkit.doctor.check import check_run
from hpc_toolkit.doctor.filesystem import (
    LIMIT_S,
    LOST_HOSTS,
    check_mount,
    check_names,
    check_space,
    check_views,
    check_writing,
)
from hpc_toolkit.doctor.findings import Finding, Report, Verdict, fine, worst
from hpc_toolkit.doctor.locks import check_locks, waiting_for_server
from hpc_toolkit.doctor.node import check_devices, check_slurm, check_variables
from hpc_toolkit.doctor.partner import ARRIVAL_S, STEP_ARRIVAL_S, helper
from hpc_toolkit.doctor.repairs import plan_repairs
from hpc_toolkit.doctor.sides import LEAD, Pair, make_area, remove_area, sweep
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.rundir.mounts import mount_of
from hpc_toolkit.rundir.proof import believed, write_proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hpc_toolkit.doctor.partner import Step
    from hpc_toolkit.rundir.mounts import Mount
    from hpc_toolkit.system.clock import Clock

_NO_TROUBLE = (Verdict.FINE, Verdict.SKIPPED)
_PAIR_IT = "'srun -N2 --ntasks-per-node=1 hpctk doctor DIR', or --pair with a second mount"


def examine(
    directory: Path,
    clock: Clock,
    *,
    other: Path | None = None,
    step: Step | None = None,
    around: bool = False,
) -> Report:
    """Examine a directory, and the run in it if it is one; remove all files that it creates.

    The result is stored in the run if the two sides stand for two hosts.

    Args:
        directory: the directory to examine; it may be an active run.
        clock: gives the wall time of the stored result, for people.
        other: the same directory through another mount of this machine.
        step: the step of this task, which leads; the other task calls ``join_step``.
        around: whether to examine Slurm and GPUs as well.

    Raises:
        ConfigError: ``other`` is another directory.
        RunError: the other side did not arrive, or stopped answering.
    """
    mount, local = mount_of(directory), files.is_local(directory)
    means = "a run here is for processes of this machine" if local else ""
    where = f"{mount.kind}, {mount.source} at {mount.point}"
    found = [
        fine("filesystem", where, means),
        check_mount(mount),
        *check_space(directory),
    ]
    report = Report(str(directory), found)
    around_it: list[Finding] = []
    token = step.token if step is not None else os.urandom(6).hex()
    try:
        with waiting_for_server(mount):
            area = make_area(directory, token, LEAD)
    except OSError as error:
        found.append(_unwritable(directory, error))
    else:
        try:
            if swept := sweep(directory, area):
                words = f"removed what an examination left that was killed: {', '.join(swept)}"
                found.append(fine("left over", words))
            with _pair(area, other or directory, step) as pair:
                paired = other is not None or step is not None
                found.append(_check_sides(pair, paired=paired, local=local))
                _check_pair(report, pair, mount)
                if around:
                    # Two tasks on one node see the same devices.
                    nodes = step is not None and pair.here.host != pair.there.host
                    around_it += check_devices(pair, nodes=nodes)
        finally:
            remove_area(area)
    of_directory = list(found)
    found += around_it
    if around:
        found += [check_slurm(), *check_variables()]
    if RunPaths(directory).manifest.exists():
        found += _look_at_run(directory, report, of_directory, clock)
    return report


@contextmanager
def _pair(area: Path, root: Path, step: Step | None) -> Iterator[Pair]:
    """Connect to the other side: the second task of the step, else a child of this process."""
    if step is not None:
        pair = Pair(area, arrival_s=STEP_ARRIVAL_S)
        yield pair
        pair.close()
        return
    with helper(root, area):
        pair = Pair(area, arrival_s=ARRIVAL_S)
        yield pair
        pair.close()


def _look_at_run(
    directory: Path, report: Report, of_directory: list[Finding], clock: Clock
) -> list[Finding]:
    paths, found = RunPaths(directory), []
    if report.apart:
        try:
            _keep(report, of_directory, paths, clock)
        except OSError as error:
            found.append(_failed("doctor.json", error))
    try:
        found += [_how_deaths_are_seen(paths), *check_run(directory)]
        with suppress(HpcToolkitError):  # an unreadable run.json, which check_run has reported
            found += plan_repairs(directory).findings()
    except HpcToolkitError as error:
        means = "commands end there, and the files below it are not reachable"
        found.append(Finding("run", Verdict.UNSAFE, error.message, means, error.hint))
    except OSError as error:
        found.append(_failed("run", error))
    return found


def _check_pair(report: Report, pair: Pair, mount: Mount) -> None:
    """Make all checks of the directory that need two sides."""
    report.sides, report.apart = (pair.here, pair.there), pair.apart

    def views() -> list[Finding]:
        findings, report.delays_s = check_views(pair)
        return findings

    def trial() -> list[Finding]:
        findings, excludes = check_locks(pair, mount)
        report.locks_proven = pair.apart and excludes
        return findings

    checks: dict[str, Callable[[], list[Finding]]] = {
        "exclusive names": lambda: check_names(pair),
        "delays": views,
        "locks": trial,
        "fsync": lambda: [check_writing(pair.area)],
    }
    for name, check in checks.items():
        try:
            report.findings += check()
        except OSError as error:
            report.findings.append(_failed(name, error))


def _check_sides(pair: Pair, *, paired: bool, local: bool) -> Finding:
    here, there = pair.here, pair.there
    who = f"{here.host} alone"
    if here.host != there.host:
        who = " and ".join(sorted((here.host, there.host)))
    if pair.apart:
        return fine("sides", f"{who}: {here.mount.point} and {there.mount.point}")
    if local and not paired:
        return fine("sides", who)
    through = ": both sides use one mount of one kernel" if paired else ", through one mount"
    means = "whether other hosts see the same files and locks was not checked"
    return Finding("sides", Verdict.UNKNOWN, f"{who}{through}", means, _PAIR_IT)


def _keep(report: Report, found: list[Finding], paths: RunPaths, clock: Clock) -> None:
    """Store the result for workers, which read it at their start, and for users of the run."""
    seen_after_s = report.delays_s.values() or [0.0]
    record = {
        "at": round(clock.wall(), 3),
        "hpctk": __version__,
        "verdict": worst(found),
        "troubles": [one.to_json() for one in found if one.verdict not in _NO_TROUBLE],
        "locks_proven": report.locks_proven,
        "delays_s": report.delays_s,
        "least_lease_s": 2 * max(LIMIT_S if one is None else one for one in seen_after_s),
        "sides": [side.to_json() for side in report.sides],
    }
    write_proof(paths.doctor, record)


def _how_deaths_are_seen(paths: RunPaths) -> Finding:
    check = "deaths"
    if believed(paths).locks:
        found = "on other hosts by a free lock, after a missed heartbeat"
        means = (
            "workers that start from now on use it: locks were proven for this filesystem; "
            f"{LOST_HOSTS}"
        )
        return fine(check, found, means)
    found = "on other hosts by the lease, 180 s by default"
    if files.is_local(paths.root):
        return fine(check, found)
    means = "the unit of a lost worker waits for that long, unless Slurm speaks sooner"
    fix = f"where locks reach other hosts, prove it: {_PAIR_IT}"
    return Finding(check, Verdict.SLOWER, found, means, fix)


def _unwritable(directory: Path, error: OSError) -> Finding:
    found = f"cannot make a directory in {directory}: {error.strerror}"
    means = "no worker can work here; the other checks were skipped"
    fix = "check the owner, the permissions, the mount and the quota"
    return Finding("writing", Verdict.UNSAFE, found, means, fix)


def _failed(check: str, error: OSError) -> Finding:
    where = f" ({os.path.basename(error.filename)})" if isinstance(error.filename, str) else ""
    found = f"failed: {error.strerror or error}{where}"
    means = "a worker that meets this ends, and its items wait for others"
    fix = "try again; if it stays, ask the site, or choose another directory"
    return Finding(check, Verdict.UNSAFE, found, means, fix)
