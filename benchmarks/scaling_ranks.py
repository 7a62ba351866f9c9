"""What 'hpctk scaling run' and 'analyze' say of local ranks, beside plain torchrun.

    python benchmarks/scaling_ranks.py [--world-sizes 1,2,4] [--repeats 5] [--max-steps 60]

In each round every world size is measured once by 'hpctk scaling run', which goes on with what
it has (--resume), and once by benchmarks/plain_ddp.py: the same model and batch under torchrun,
timed over all of its steps and by nothing else. So both are disturbed alike, and the ratio says
what measuring costs. Ranks compute with one thread each. On a machine with fewer cores than
ranks, the ranks take turns: no efficiency here says anything of GPUs.

Takes about seven minutes on two idle cores. Needs the extra torch.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import number, parser
from resultsfile import facts, table, write_section

TITLE = "Scaling of a training over local ranks"
PLAIN = Path(__file__).with_name("plain_ddp.py")


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--world-sizes", default="1,2,4", help="numbers of ranks")
    given.add_argument("--repeats", type=number, default=5, help="rounds")
    given.add_argument("--max-steps", type=number, default=60, help="steps that are measured")
    given.add_argument("--keep", type=Path, help="a directory that is not there, for the records")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    sizes = [int(word) for word in options.world_sizes.split(",")]
    scratch = Path(tempfile.mkdtemp(prefix="scaling-ranks-"))
    directory = options.keep or scratch / "run"
    plain: dict[int, list[float]] = {size: [] for size in sizes}
    try:
        for turn in range(1, options.repeats + 1):
            run(directory, options.world_sizes, turn, options.max_steps)
            for size in sizes:
                plain[size].append(alone(size, options.max_steps))
            print(f"round {turn} of {options.repeats}", file=sys.stderr, flush=True)
        (found,) = json.loads(hpctk("analyze", str(directory), "--json"))["series"]
        ours = {size: rates(directory, size) for size in sizes}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    about = (
        f"{options.repeats} rounds of {options.max_steps} steps, default model (decoder-4x128), "
        "8 samples of 128 tokens per step for all ranks together, gloo, one thread per rank."
    )
    lines = [about, "", *page(found, ours, plain)]
    print("\n".join(lines))
    if options.write:
        write_section(TITLE, [facts(), "", *lines])


def hpctk(*words: str) -> str:
    argv = [sys.executable, "-m", "hpc_toolkit", "scaling", *words]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout


def run(directory: Path, sizes: str, repeats: int, steps: int) -> None:
    """Measure the repeats that are missing from the directory."""
    words = ("--world-sizes", sizes, "--repeats", str(repeats), "--max-steps", str(steps))
    hpctk("run", "-o", str(directory), *words, "--threads", "1", "--resume")


def alone(size: int, steps: int) -> float:
    """Samples a second under plain torchrun."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size))
    argv = [sys.executable, *launcher, str(PLAIN), "--steps", str(steps)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=environ)
    rate: float = json.loads(done.stdout.splitlines()[-1])["samples_per_s"]
    return rate


def rates(directory: Path, size: int) -> list[float]:
    """Samples a second of each repeat."""
    lines = (directory / "records" / f"world-{size}.jsonl").read_text().splitlines()
    found = {one["repeat"]: one["samples_per_s"] for one in map(json.loads, lines)}
    return [found[repeat] for repeat in sorted(found)]


def page(
    found: dict[str, Any], ours: dict[int, list[float]], plain: dict[int, list[float]]
) -> list[str]:
    """The table, and what the analysis advises."""
    head = ["ranks", "samples/s", "tokens/s", "step", "communication", "loading", "memory"]
    head += ["efficiency", "plain torchrun, samples/s", "hpctk / plain, of each round"]
    sizes = [row["world_size"] for row in found["rows"]]
    rows = [
        cells(row, ours[size], plain[size]) for row, size in zip(found["rows"], sizes, strict=True)
    ]
    reasons = [one for one in found["verdict"]["reasons"] if "'s law" not in one]
    return [
        *table(head, rows),
        "",
        f"{found['advice']}.",
        "",
        *(f"- {one}" for one in [*reasons, *found["notes"]]),
    ]


def cells(row: dict[str, Any], ours: list[float], plain: list[float]) -> list[str]:
    ends = [row.get(f"communication_{end}") for end in ("low", "high")]
    shares = "" if None in ends else f" ({ends[0]:.1%} to {ends[1]:.1%})"
    return [
        str(row["world_size"]),
        f"{row['rate_per_s']:.1f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{1000 * row['step_median_s']:.1f} ms",
        f"{row['shares']['communication']:.1%}{shares}",
        f"{row['shares']['loading']:.1%}",
        f"{row['rss_bytes'] / 2**20:.0f} MiB",
        f"{row['efficiency']:.1%} ({row['low']:.1%} to {row['high']:.1%})",
        spread(plain, ".1f"),
        spread([one / other for one, other in zip(ours, plain, strict=True)], ".2f"),
    ]


def spread(values: list[float], digits: str) -> str:
    ends = f"{min(values):{digits}} to {max(values):{digits}}"
    return f"{statistics.median(values):{digits}} ({ends})"


if __name__ == "__main__":
    main()
