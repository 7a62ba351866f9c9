"""One step of a bandit: ask, 32 no-ops on 8 warm local workers, tell; beside Dask and submitit.

    python benchmarks/bandit_step.py [--steps N] [--rounds N] [--peer-python PYTHON] [--write]

A step of this project is the time between two asks of a campaign that runs one arm at a time: the
policy is told and asked, 32 items are published, claimed, run and journaled, and the coordinator
sees them all. A step of Dask is ``client.map`` and ``client.gather`` of 32 functions on a
LocalCluster of 8 processes, which keeps nothing on disk. A step of submitit is an array of 8 jobs,
each of four no-ops, by its LocalExecutor, which starts a process for each job, and with ``--slurm``
on the Slurm that sbatch finds, such as that of ``hpctk lab``; few steps are shown. Neither asks a
policy, so what this one takes for as many asks and tells of as many scores is a row of its own,
measured in one process: it is within the first row, and adds to the others. The systems take turns,
``--rounds`` times; the first step of each turn warms up and is left out.

``--write`` puts the table into benchmarks/results.md.

Takes about two minutes. Needs submitit, and for Dask a Python with ``distributed``
(benchmarks/peers.txt); without it that row is left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from arguments import number, number_or_none, parser
from resultsfile import facts, table, write_section

WORKERS, TASKS = 8, 32
LAYERS, SCHEDULE = 24, (0, 1, 4, 16)
SUBMITIT_STEPS = 3
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
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
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
    (root / "steps.py").write_text(WORKLOAD)
    names = ", ".join(f'"t{task}"' for task in range(TASKS))
    (root / "campaign.toml").write_text(
        f'name = "steps"\n[[models]]\nname = "s"\nlayers = {LAYERS}\nsize = 1000\n'
        f"steps = {list(SCHEDULE)}\n"
        '[metrics]\nworkload = "steps:Layers"\n'
        f'[tasks]\nworkload = "steps:Tasks"\nnames = [{names}]\n'
        f'[search]\npolicy = "{policy}"\nbudget = {steps + 2}\npending = 1\n'
    )
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
    # Each decision says when it was made; times of files are those of a clock that ticks slowly.
    stage = root / "runs" / "steps" / "stages" / "tasks"
    times = []
    for entry in sorted((stage / "log").iterdir(), key=lambda path: int(path.name)):
        if entry.readlink().parent.name == "items":
            with (stage / entry.readlink()).open(encoding="utf-8") as lines:
                times.append(json.loads(next(lines))["decision"]["wall_s"])
    # Without the first step, and without the seal behind the last ask.
    return [after - before for before, after in pairwise(times[1 : steps + 2])]


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
