"""One step of a bandit: ask, 32 no-ops on 8 warm local workers, tell; beside Dask and submitit.

    python benchmarks/bandit_step.py [--steps N] [--rounds N] [--peer-python PYTHON] [--write]
    python benchmarks/bandit_step.py --nfs [--steps N] [--write]

A step of this project is the time between two asks of a campaign that runs one arm at a time: the
policy is told and asked, 32 items are published, claimed, run and journaled, and the coordinator
sees them all. A step of Dask is ``client.map`` and ``client.gather`` of 32 functions on a
LocalCluster of 8 processes, which keeps nothing on disk. A step of submitit is an array of 8 jobs,
each of four no-ops, by its LocalExecutor, which starts a process for each job, and with ``--slurm``
on the Slurm that sbatch finds, such as that of ``hpctk lab``; few steps are shown. Neither asks a
policy, so what this one takes for as many asks and tells of as many scores is a row of its own,
measured in one process: it is within the first row, and adds to the others. The systems take turns,
``--rounds`` times; the first step of each turn warms up and is left out.

With ``--nfs`` the coordinator and the workers are on two hosts, which are kernels of their own
(user-mode Linux) and mount an export of a third one. Afterwards one host makes names and the other
one looks for each, at the intervals at which workers look: NFS's own delay, in one direction. A
step needs both directions.

``--write`` puts the table into benchmarks/results.md.

Takes about two minutes. Needs submitit, and for Dask a Python with ``distributed``
(benchmarks/peers.txt); without it that row is left out. ``--nfs`` needs root and the packages that
``.ci/system`` installs, and takes four minutes.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING

from arguments import number, number_or_none, parser
from resultsfile import facts, table, write_section

from tests.sharedfs.hosts import HOSTS, HostsError

if TYPE_CHECKING:
    from tests.sharedfs.hosts import Hosts
    from tests.sharedfs.rehearsal import Rehearsal

WORKERS, TASKS = 8, 32
LAYERS, SCHEDULE = 24, (0, 1, 4, 16)
SUBMITIT_STEPS = 3
LONGEST = 1.5
"""Goal on NFS: the most times that its own delay fits into a step."""
TITLE = "One step of a bandit"
PEERS = Path(__file__).parent.parent / ".venv" / "peers" / "bin" / "python"

WORKLOAD = """
class Layers:
    def load(self, group):
        return None

    def run(self, context, items):
        for item in items:
            yield {"length": 1.0}


class Tasks(Layers):
    def run(self, context, items):
        for item in items:
            yield {"score": item["layer"] / 24, "stderr": 0.01}
"""

MAKE = """
import os, sys
for line in sys.stdin:
    os.symlink("worker", line.strip())
    print(flush=True)
"""

LOOK = """
import os, random, sys, time
seen = {"listed": lambda name: os.path.basename(name) in os.listdir(os.path.dirname(name)),
        "found by its name": os.path.lexists}[sys.argv[1]]
for line in sys.stdin:
    name = line.strip()
    print(seen(name), flush=True)
    while not seen(name):
        time.sleep(random.uniform(1.0, 1.25))
    print(flush=True)
"""
"""Looks as often as a waiting worker."""

DASK = """
import json, sys, time
from distributed import Client, LocalCluster

def noop(step, task):
    return task

if __name__ == "__main__":
    workers, tasks, steps, where = (*map(int, sys.argv[1:4]), sys.argv[4])
    with LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address=None, local_directory=where
    ) as cluster, Client(cluster) as client:
        client.wait_for_workers(workers)
        took = []
        for step in range(steps + 1):
            began = time.perf_counter()
            futures = client.map(noop, [step] * tasks, range(tasks))
            assert client.gather(futures) == list(range(tasks))
            took.append(time.perf_counter() - began)
    print(json.dumps(took[1:]))
"""


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--steps", type=number, default=40, help="in each turn")
    given.add_argument("--rounds", type=number, default=2, help="turns of each system")
    given.add_argument(
        "--submitit-steps", type=number_or_none, default=SUBMITIT_STEPS, help="seconds each"
    )
    given.add_argument("--slurm", action="store_true", help="submitit on Slurm as well")
    given.add_argument("--policy", default="gp-ucb", help="that this project asks")
    given.add_argument("--peer-python", type=Path, default=PEERS, help="with distributed")
    given.add_argument("--nfs", action="store_true", help="on two hosts, without other systems")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    if options.nfs:
        on_nfs(options.steps, options.policy, write=options.write)
        return
    alone = f"{options.policy} alone: ask, tell"
    found: dict[str, list[float]] = {f"this project, {options.policy}": [], alone: [], "Dask": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            ours = campaign_steps(Path(scratch), options.steps, options.policy)
            found[f"this project, {options.policy}"] += ours
        found[alone] += policy_steps(options.steps, options.policy)
        if has_dask(options.peer_python):
            with tempfile.TemporaryDirectory() as scratch:
                found["Dask"] += dask_steps(Path(scratch), options.steps, options.peer_python)
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("local", "slurm") if options.slurm else ("local",):
            took = submitit_steps(Path(scratch), options.submitit_steps, name)
            found[f"submitit, {name}"] = took
    head = ["system", "steps", "median", "p90"]
    rows = [
        [name, str(len(took)), *(f"{1000 * one:,.0f} ms" for one in (middle(took), late(took)))]
        for name, took in found.items()
        if took
    ]
    lines = [f"{TASKS} no-op items per step on {WORKERS} local workers.", "", *table(head, rows)]
    print("\n".join(lines))
    if options.write:
        write_section(TITLE, ["", facts(), "", *lines])


def middle(took: list[float]) -> float:
    return statistics.median(took)


def late(took: list[float]) -> float:
    """Nine of ten are quicker."""
    return sorted(took)[(9 * len(took) - 1) // 10]


def policy_steps(steps: int, name: str) -> list[float]:
    """Seconds of asks and tells of a policy over the arms of the campaign, without any queue."""
    from hpc_toolkit.bandit import Arm, ArmTable, Observation, TaskSet, make_policy
    from hpc_toolkit.bandit.arms import GEOMETRY_NAMES, geometry_features

    names = [f"t{task}" for task in range(TASKS)]
    arms = []
    for step in SCHEDULE:
        for layer in range(LAYERS + 1):
            features = geometry_features(size=1000, step=step, layer=layer, layers=LAYERS)
            arms.append(Arm(f"step{step}/layer{layer}", f"step{step}", features))
    table = ArmTable(tuple(arms), GEOMETRY_NAMES)
    policy = make_policy(name, table, seed=0, tasks=TaskSet(tuple(names)))
    took = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        for proposal in policy.ask(1):
            score = table.index(proposal.arm) % (LAYERS + 1) / LAYERS
            policy.tell(
                Observation(proposal.arm, dict.fromkeys(names, score), dict.fromkeys(names, 0.01))
            )
        took.append(time.perf_counter() - began)
    return took[1:]


def campaign_steps(root: Path, steps: int, policy: str) -> list[float]:
    """Seconds between the asks of a campaign that evaluates one arm at a time."""
    write_campaign(root, steps, policy)
    argv = [
        sys.executable,
        "-m",
        "hpc_toolkit",
        "campaign",
        "run",
        "campaign.toml",
        "--workers",
        str(WORKERS),
    ]
    subprocess.run(argv, cwd=root, check=True, capture_output=True, timeout=600)
    stage = root / "runs" / "steps" / "stages" / "tasks"
    argv = list_log(stage / "log")
    listing = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return between_asks(listing, steps)


def write_campaign(root: Path, steps: int, policy: str) -> None:
    (root / "steps.py").write_text(WORKLOAD)
    names = ", ".join(f'"t{task}"' for task in range(TASKS))
    (root / "campaign.toml").write_text(
        f'name = "steps"\n[[models]]\nname = "s"\nlayers = {LAYERS}\nsize = 1000\n'
        f"steps = {list(SCHEDULE)}\n"
        '[metrics]\nworkload = "steps:Layers"\n'
        f'[tasks]\nworkload = "steps:Tasks"\nnames = [{names}]\n'
        f'[search]\npolicy = "{policy}"\nbudget = {steps + 2}\npending = 1\n'
    )


def list_log(log: Path) -> list[str]:
    """The command that lists the entries of a log: name, seconds of the epoch and target."""
    return ["find", str(log), "-type", "l", "-printf", r"%f %T@ %l\n"]


def between_asks(listing: str, steps: int) -> list[float]:
    """Seconds between the asks of a log, without the first step, and without the seal behind the
    last ask. A filesystem's times tick every few milliseconds.
    """
    lines = sorted((line.split() for line in listing.splitlines()), key=lambda line: int(line[0]))
    times = [float(at) for _, at, target in lines if "items/" in target]
    return [after - before for before, after in pairwise(times[1 : steps + 2])]


def on_nfs(steps: int, policy: str, *, write: bool) -> None:
    """Print and write how long a step and the visibility of a name take on NFS."""
    from nfs_load import opened

    from tests.sharedfs.filesystems import mounted
    from tests.sharedfs.nfs import NFS42

    if os.geteuid() != 0:
        sys.exit("error: only root can mount filesystems")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="step-nfs-", ignore_cleanup_errors=True) as name,
            mounted(Path(name), (NFS42,)) as filesystems,
            opened(filesystems[NFS42.name], Path(name), "steps", 2 * WORKERS) as run,
        ):
            took = {"one step": nfs_steps(run.rehearsal, steps, policy)}
            for what, times in (("listed", 20), ("found by its name", 3)):
                directory = run.rehearsal.filesystem.shared / what.partition(" ")[0]
                took[f"a name is {what}"] = names_seen(run.hosts, directory, what, times)
    except HostsError as error:
        sys.exit(f"error: {error}\nhint: .ci/system installs what is needed")
    shown = [
        [what, str(len(some)), f"{middle(some):.2f} s", f"{late(some):.2f} s"]
        for what, some in took.items()
    ]
    step_s, listed_s = (middle(took[what]) for what in ("one step", "a name is listed"))
    met = "met" if step_s <= LONGEST * listed_s else "MISSED"
    words = (
        f"{TASKS} no-op items per step; the coordinator on one host, {WORKERS} workers on another. "
        f"A step takes {step_s / listed_s:.2f} times as long as a listing needs to show a name of "
        f"the other host. Goal: at most {LONGEST}; {met}."
    )
    lines = [words, "", *table(["on NFSv4.2, between kernels", "times", "median", "p90"], shown)]
    print("\n".join(lines))
    if write:
        write_section(f"{TITLE} on NFS", [facts(), "", *lines])


def nfs_steps(rehearsal: Rehearsal, steps: int, policy: str) -> list[float]:
    """Seconds between the asks of a coordinator on one host, with all workers on the other one."""
    write_campaign(rehearsal.cwd, steps, policy)
    maker, worker = HOSTS
    rehearsal.hpctk(maker, "init", rehearsal.run, "--campaign", rehearsal.cwd / "campaign.toml")
    workers = rehearsal.start(worker, "work", str(rehearsal.run), "--workers", str(WORKERS))
    coordinator = rehearsal.start(maker, "campaign", "coordinate", str(rehearsal.run))
    for one in (coordinator, workers):
        ended = one.ended(limit_s=60.0 + 10.0 * steps)
        assert ended.code == 0, ended
    log = rehearsal.run / "stages/tasks/log"
    return between_asks(rehearsal.filesystem.hosts.call(maker, *list_log(log)), steps)


def names_seen(hosts: Hosts, directory: Path, what: str, times: int) -> list[float]:
    """Seconds from the making of a name on one host until the other one sees it."""
    hosts.call(HOSTS[0], "mkdir", directory)
    found = []
    with ExitStack() as stack:
        make, look = (
            stack.enter_context(
                subprocess.Popen(
                    hosts.command(host, [sys.executable, "-c", *code]),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd="/",
                    text=True,
                )
            )
            for host, code in zip(HOSTS, ([MAKE], [LOOK, what]), strict=True)
        )
        for name in range(times):
            assert say(look, directory / str(name)) == "False"
            time.sleep(random.uniform(0.0, 1.25))
            say(make, directory / str(name))
            began = time.monotonic()
            line_of(look.stdout)
            found.append(time.monotonic() - began)
    return found


def say(process: subprocess.Popen[str], word: object) -> str:
    """Tell a process a word; return its answer."""
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    return line_of(process.stdout)


def line_of(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def has_dask(python: Path) -> bool:
    """Whether an interpreter is there and has ``distributed``."""
    if not python.exists():
        return False
    argv = [str(python), "-c", "import distributed"]
    return subprocess.run(argv, capture_output=True, check=False, timeout=60).returncode == 0


def dask_steps(root: Path, steps: int, python: Path) -> list[float]:
    """Seconds of each step of Dask."""
    script = root / "dask_steps.py"
    script.write_text(DASK)
    argv = [str(python), str(script), *map(str, (WORKERS, TASKS, steps)), str(root)]
    ended = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=600)
    took: list[float] = json.loads(ended.stdout)
    return took


def four_noops(first: int) -> list[int]:
    """One job of submitit."""
    return [first, first + 1, first + 2, first + 3]


def submitit_steps(root: Path, steps: int, cluster: str) -> list[float]:
    """Seconds of each step of submitit on ``local`` or ``slurm``."""
    import submitit

    executor = submitit.AutoExecutor(folder=root / cluster, cluster=cluster)
    executor.update_parameters(timeout_min=5)
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        jobs = executor.map_array(four_noops, range(0, TASKS, TASKS // WORKERS))
        assert [one for job in jobs for one in job.result()] == list(range(TASKS))
        took.append(time.perf_counter() - began)
    return took


if __name__ == "__main__":
    main()
