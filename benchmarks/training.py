"""Trainings on a real Slurm: losses beside one process, what a killed rank costs, and trees.

    python benchmarks/training.py [--parts losses,restarts,trees] [--models mini-s,plain] [--write]

losses    examples/train_ddp.py by each training template on a lab (gloo, SGD, float32, one global
          batch): two trainings at once on the same nodes, one preempted, one warned by its time
          limit, one of which a rank is killed. The loss of each step beside that of one process
          without Slurm. GPUs of a lab are pretended: all ranks compute on the processor.
restarts  a rank of two is killed under ``hpctk launch``, and under torchrun with the same script,
          in turns, without Slurm: seconds from SIGKILL until the next step was made.
trees     examples/train_trees.py in jobs that were granted all cores, and in jobs with one.

Takes about ten minutes on two cores with nothing beside it; ``--parts`` runs some alone. Needs
root, the packages of .ci/system, the extra ``demo`` and the group ``oracles``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import number, parser
from ending import end, family
from resultsfile import facts, write_section
from tracefile import send
from trainingjobs import CORES, Row, Trainings, grown
from trainingpage import GROWERS, HANGS_S, OURS, THEIRS, missed, page
from trainingruns import (
    DDP,
    Restart,
    Size,
    kill_rank,
    loss_lines,
    restart_after,
    saved_step,
    wait_for,
)

from hpc_toolkit.lab.settings import LabSettings
from tests.slurm.reallab import LabUnderTest
from tests.slurm.templatesite import Site

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = ("losses", "restarts", "trees")
MODELS = ("mini-s", "plain")
LAUNCHERS = {
    OURS: ("-m", "hpc_toolkit", "launch", "--backend", "gloo"),
    THEIRS: ("-m", "torch.distributed.run", "--standalone"),
}
_START_S = 600.0


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--parts", type=some_of(PARTS), default=",".join(PARTS), help="some of them")
    given.add_argument(
        "--models", type=some_of(MODELS), default=",".join(MODELS), help="some of them"
    )
    given.add_argument("--steps", type=number, default=100, help="of each training")
    given.add_argument("--rounds", type=number, default=3, help="turns of restarts and trees")
    given.add_argument("--rows", type=number, default=40_000, help="that trees learn from")
    given.add_argument("--json", type=Path, help="a file for the numbers")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    if options.steps < 30:
        given.error("--steps: at least 30, since checkpoints are 10 apart")
    # However it is told to end, also where a shell has it ignore Ctrl-C, the lab is taken down.
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.default_int_handler)
    load, found = os.getloadavg()[0], dict[str, Any]()
    try:
        measure(options, found)
    except KeyboardInterrupt:
        sys.exit("interrupted; everything that was started has ended")
    lines = [f"{facts()} Load before: {load:.1f}.", "", *page(options.steps, options.rows, found)]
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(plain(found), indent=1) + "\n")
    if options.write:
        write_section("Trainings on a real Slurm", lines)
    sys.exit(1 if missed(found) else 0)


def some_of(names: tuple[str, ...]) -> Any:
    """A list of some of these names."""

    def chosen(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [one for one in found if one not in names]:
            message = f"{unknown[0]!r} is none of {', '.join(names)}"
            raise argparse.ArgumentTypeError(message)
        return found

    return chosen


def measure(options: argparse.Namespace, found: dict[str, Any]) -> None:
    size = Size(options.steps)
    with tempfile.TemporaryDirectory(prefix="hpctk-", ignore_cleanup_errors=True) as name:
        root = Path(name)
        if "restarts" in options.parts:
            found["restarts"] = restarts(root / "restarts", size, options.rounds)
        if {"losses", "trees"} & set(options.parts):
            with real_slurm(root) as site:
                if "losses" in options.parts:
                    found["losses"] = [losses(site, model, size) for model in options.models]
                if "trees" in options.parts:
                    words = (
                        "--rows",
                        str(options.rows),
                        "--rounds",
                        "200",
                        "--checkpoint-every",
                        "50",
                    )
                    found["trees"] = trees(site, words, options.rounds)


@contextmanager
def real_slurm(root: Path) -> Iterator[Site]:
    """A lab, and a directory to submit from."""
    lab = LabUnderTest(root / "lab", LabSettings(nodes=8, gpus_per_node=4))
    (root / "work").mkdir()
    try:
        lab.up()
        yield Site(lab, root / "work")
    finally:
        lab.down()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def losses(site: Site, model: str, size: Size) -> dict[str, Any]:
    """All trainings of a model."""
    trainings = Trainings(site, model, size)
    say(f"{model}: {size.steps} steps in one process")
    trainings.alone()
    rows: list[Row] = []

    def ended(*names: str) -> None:
        for name in names:
            rows.append(trainings.end(name))
            say(f"{model} {name}: {rows[-1].state}, difference {rows[-1].difference:.1e}")

    say(f"{model}: two trainings on the same two nodes")
    trainings.start_together()
    trainings.start_disturbed()
    ended("nodes", "ranks")
    for name, node in {"single": "n3", "gpus": "n4", "cpu": "n5"}.items():
        trainings.start(name, nodelist=node)
    trainings.preempt()
    ended("single", "gpus", "cpu", "preempted", "warned")
    trainings.start("killed", place="nodes", nodelist="n[1-2]")
    restart = trainings.kill()
    ended("killed")
    together = trainings.together("ranks", "nodes")
    return {"model": model, "jobs": rows, "together": together, "restart": restart}


def restarts(root: Path, size: Size, rounds: int) -> dict[str, list[Restart | None]]:
    """What a killed rank costs under each launcher, in turns."""
    found: dict[str, list[Restart | None]] = {name: [] for name in LAUNCHERS}
    root.mkdir()
    for turn in range(rounds):
        for name, words in LAUNCHERS.items():
            run = root / f"{name.replace(' ', '-')}-{turn}"
            found[name].append(restarted(run, words, size))
            say(f"{name}, turn {turn + 1}: {found[name][-1]}")
    return found


def restarted(run: Path, words: tuple[str, ...], size: Size) -> Restart | None:
    """Kill one of two ranks; None if no step was made again in time, or the launch ended."""
    argv = [sys.executable, *words, "--nproc-per-node", "2", "--max-restarts", "3", DDP]
    argv += [*Size(1_000_000, size.every).words("plain"), "--output", str(run)]
    # A rank's share of the cores, as a rendered job would have it; launchers leave logs in TMPDIR.
    environ = {**os.environ, "OMP_NUM_THREADS": str(max(1, CORES // 2)), "TMPDIR": str(run.parent)}
    after = 2 * size.every + size.every // 2
    with (run.parent / f"{run.name}.out").open("wb") as out:
        process = subprocess.Popen(argv, env=environ, stdout=out, stderr=out)
        try:
            wait_for(lambda: process.poll() is not None or len(loss_lines(run)) > after, _START_S)
            assert process.poll() is None, Path(out.name).read_text()
            assert saved_step(run), "nothing was saved"
            at, saved = kill_rank(run, 1)
            wait_for(
                lambda: process.poll() is not None or restart_after(run, at, saved) is not None,
                HANGS_S,
            )
            return restart_after(run, at, saved)
        finally:
            started = family(process.pid)[1:]
            end(process, limit_s=10.0)
            send(signal.SIGKILL, *[one for one in started if is_training(one, run)])


def is_training(process: int, run: Path) -> bool:
    """Whether a process is a rank of this run still; numbers of processes are given anew."""
    try:
        return str(run).encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def trees(site: Site, words: tuple[str, ...], rounds: int) -> list[dict[str, Any]]:
    """What each job with trees printed, one core and all of them in turns."""
    found = []
    for turn in range(rounds):
        for name in GROWERS:
            for threads in dict.fromkeys((1, CORES)):
                found.append({"granted": threads, **grown(site, name, threads, turn, words)})
                said = found[-1]
                say(f"{name} on {threads}: {said['seconds']} s, {said['busy_cores']} cores busy")
    return found


def plain(found: Any) -> Any:
    """What JSON can hold; a difference that is not there is null."""
    if isinstance(found, Row | Restart):
        return plain(asdict(found))
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, list):
        return [plain(one) for one in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


if __name__ == "__main__":
    main()
