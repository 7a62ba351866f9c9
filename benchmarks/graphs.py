"""Seconds of items that follow each other, in hpctk and in other tools.

    python benchmarks/graphs.py [--items 100000] [--workers 8] [--tool parsl] [--write]

Graphs: a pipeline (``train``, an item of ``evaluate`` after each, ``rank`` after ten of these,
``summary`` after all), a random graph (up to three of the 1,000 items before), and a chain of
1,000. No item does anything. hpctk makes the pipeline as stages, which copy results into the next
items; its seconds are those of ``init`` and ``work``, with the start of all workers. HyperQueue
runs ``true`` for each item, and its seconds are those from the submission to the last item; Parsl's
(HighThroughputExecutor) those from the first call to the last result. Snakemake makes a file for
each item; give it fewer. ``--dir`` may be on a shared filesystem.

Takes about 10 minutes by default. The others are those that ``.venv/peers`` has: see peers.txt.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import directory, number, parser, seconds

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
PEER_PYTHON = HERE.parent / ".venv" / "peers" / "bin" / "python"
SHAPES = ("pipeline", "random", "chain")
SEEDS = 10


def nothing(id: int) -> int:  # noqa: A002 - the key of the items
    return id


def train(lr: int, seed: int) -> int:
    return lr + seed


def evaluate(lr: int, seed: int, train: int) -> int:
    return lr + seed + train


def rank(lr: int, evaluate: list[dict[str, Any]]) -> int:
    return lr + len(evaluate)


def summary(rank: list[dict[str, Any]]) -> int:
    return len(rank)


def edges(shape: str, items: int) -> list[list[int]]:
    """The items that each item follows, by number; each one comes behind these."""
    if shape == "chain":
        return [[n - 1] if n else [] for n in range(min(items, 1000))]
    if shape == "random":
        draw = random.Random(7)
        return [
            sorted(draw.sample(range(max(0, n - 1000), n), min(n, draw.randrange(4))))
            for n in range(items)
        ]
    groups = max(1, (items - 1) // (2 * SEEDS + 1))
    trains = groups * SEEDS
    ranks = [[trains + SEEDS * group + seed for seed in range(SEEDS)] for group in range(groups)]
    summaries = [[2 * trains + group for group in range(groups)]]
    return [*([] for _ in range(trains)), *([n] for n in range(trains)), *ranks, *summaries]


def hpctk(shape: str, before: list[list[int]], root: Path, workers: int, _cap: float) -> float:
    from hpc_toolkit import Run

    os.chdir(HERE)
    began = time.perf_counter()
    if shape == "pipeline":
        groups = len(before[-1])
        given = [{"lr": lr, "seed": seed} for lr in range(groups) for seed in range(SEEDS)]
        stages: dict[str, dict[str, Any]] = {
            "train": {"workload": "graphs:train", "items": given},
            "evaluate": {"workload": "graphs:evaluate", "after": "train"},
            "rank": {"workload": "graphs:rank", "after": "evaluate", "by": ["lr"]},
            "summary": {"workload": "graphs:summary", "after": "rank", "by": []},
        }
        run = Run.create(root / "run", stages=stages)
    else:
        items = [{"id": n, "after": after} for n, after in enumerate(before)]
        run = Run.create(root / "run", items, workload="graphs:nothing")
    argv = [sys.executable, "-m", "hpc_toolkit", "work", str(run.root), "--workers", str(workers)]
    subprocess.run(argv, check=True, stderr=subprocess.DEVNULL)
    took_s = time.perf_counter() - began
    done = sum(one.done for one in run.status().stages.values())
    assert done == len(before), f"{done} of {len(before)} are done"
    return took_s


def hyperqueue(_shape: str, before: list[list[int]], root: Path, workers: int, _c: float) -> float:
    hq = importlib.import_module("hyperqueue")
    config = importlib.import_module("hyperqueue.cluster").WorkerConfig(cores=workers)
    cluster = hq.LocalCluster(server_dir=str(root / "server"), worker_config=config)
    client, job, tasks = cluster.client(), hq.Job(), list[Any]()
    began = time.perf_counter()
    for after in before:
        none = {"stdout": None, "stderr": None}
        tasks.append(job.program(["true"], deps=[tasks[one] for one in after], **none))
    client.wait_for_jobs([client.submit(job)])
    return time.perf_counter() - began


def parsl(_shape: str, before: list[list[int]], root: Path, workers: int, cap_s: float) -> float:
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    module = importlib.import_module("parsl")
    kind = importlib.import_module("parsl.executors").HighThroughputExecutor
    executor = kind(address="127.0.0.1", max_workers_per_node=workers, encrypted=False)
    config = importlib.import_module("parsl.config").Config
    info = str(root / "runinfo")
    module.load(config(executors=[executor], run_dir=info, initialize_logging=False))
    call = module.python_app(abs)
    follow = module.python_app(_first)
    for warm in [call(n) for n in range(2 * workers)]:
        warm.result()
    began = time.perf_counter()
    futures: list[Any] = []
    for n, after in enumerate(before):
        futures.append(follow(n, inputs=[futures[one] for one in after]))
        if time.perf_counter() > began + cap_s:
            raise TimeoutError(f"{n} calls were made in {cap_s:g} s")
    for future in futures:
        future.result(timeout=max(0.001, began + cap_s - time.perf_counter()))
    took_s = time.perf_counter() - began
    module.dfk().cleanup()
    return took_s


def _first(number: int, inputs: list[int]) -> int:
    return number + len(inputs)


def snakemake(_shape: str, before: list[list[int]], root: Path, workers: int, cap: float) -> float:
    (root / "edges.json").write_text(json.dumps(before))
    (root / "Snakefile").write_text(
        "import json\nedges = json.load(open('edges.json'))\n"
        "rule all:\n    input: expand('{n}.out', n=range(len(edges)))\n"
        "rule one:\n    input: lambda w: [f'{one}.out' for one in edges[int(w.n)]]\n"
        "    output: touch('{n}.out')\n"
    )
    argv = [str(Path(sys.executable).with_name("snakemake")), "--cores", str(workers), "--quiet"]
    began = time.perf_counter()
    none = subprocess.DEVNULL
    subprocess.run(argv, check=True, cwd=root, timeout=cap, stdout=none, stderr=none)
    return time.perf_counter() - began


TOOLS: dict[str, Callable[..., float]] = {
    one.__name__: one for one in (hpctk, hyperqueue, parsl, snakemake)
}


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--items", type=number, default=100_000, help="in the larger graphs")
    given.add_argument("--workers", type=number, default=8, help="of each tool")
    given.add_argument("--tool", action="append", choices=TOOLS, help="default: all of PyPI's")
    given.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    given.add_argument("--cap", type=seconds, default=300.0, help="seconds that a graph may take")
    given.add_argument("--dir", type=directory, help="where runs are made")
    given.add_argument("--one", action="store_true", help="measure here, for the script itself")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    if options.one:
        shape, (tool,) = options.shape[0], options.tool
        before, root = edges(shape, options.items), Path(options.dir)
        print(TOOLS[tool](shape, before, root, options.workers, options.cap), flush=True)
        os._exit(0)  # whatever servers still run in it
    rows = []
    for shape in options.shape or SHAPES:
        count = len(edges(shape, options.items))
        for tool in options.tool or [name for name in TOOLS if name != "snakemake"]:
            found = measured(tool, shape, options)
            print(f"{shape}, {count} items: {tool} {found}", file=sys.stderr)
            each = f"{float(found) / count * 1000:.2f}" if found[0].isdigit() else ""
            rows.append([shape, f"{count:,}", tool, found, each])
    from resultsfile import facts, table, write_section

    load = f"{os.cpu_count()} CPUs, load {os.getloadavg()[1]:.1f} over five minutes at the end."
    head = ["graph", "items", "tool", "seconds", "ms an item"]
    lines = [facts(Path(options.dir) if options.dir else None), load, "", *table(head, rows)]
    print("\n".join(lines))
    if options.write:
        write_section("Items that follow each other", lines)


def measured(tool: str, shape: str, options: Any) -> str:
    """Seconds of one graph in one tool, or why there are none."""
    python = sys.executable if tool == "hpctk" else str(PEER_PYTHON)
    root = Path(tempfile.mkdtemp(dir=options.dir))
    argv = [python, __file__, "--one", "--tool", tool, "--shape", shape, "--dir", str(root)]
    argv += [f"--{key}={getattr(options, key)}" for key in ("items", "workers", "cap")]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=2 * options.cap
        )
    except subprocess.TimeoutExpired:
        return f"more than {2 * options.cap:g}"
    finally:
        shutil.rmtree(root, ignore_errors=True)
    last = (done.stderr.strip() or "no output").splitlines()[-1]
    return f"{float(done.stdout.split()[-1]):.1f}" if done.returncode == 0 else f"failed: {last}"


if __name__ == "__main__":
    main()
