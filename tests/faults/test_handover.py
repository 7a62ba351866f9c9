"""``campaign run`` whose coordinator is killed while a table becomes the next stage's items."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import tally

REPOSITORY = Path(__file__).parents[2]

CAMPAIGN = """
name = "toy"
seed = 3

[[models]]
name = "s"
layers = 2
size = 1000
steps = [0, 1, 4]

[metrics]
workload = "hpc_toolkit.science.workloads.synthetic:Noop"

[tasks]
workload = "tests.faults.loud:score"
names = ["a"]

[search]
policy = "gp-ucb"
budget = 5
pending = 2
"""

# Python imports this by itself as it starts: the coordinator alone, and only the first one, is cut.
HOOK = """
import mmap
import os
import sys
from pathlib import Path

if "coordinate" in sys.orig_argv:
    from tests.faults.cut import _SEEN, Cut

    root, at, way = Path("runs/toy"), int(os.environ["TEST_CUT_AT"]), os.environ["TEST_CUT_WAY"]
    try:
        os.close(os.open("first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        with open("seen", "w+b") as file:
            file.truncate(_SEEN.size)
            cut = Cut(root, at, way, mmap.mmap(file.fileno(), _SEEN.size))
        cut.install()
"""


class LocalWorkers:
    """Calls ``hpctk campaign run`` below one directory after the other."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._number = 0
        (home / "hook").mkdir()
        (home / "hook/sitecustomize.py").write_text(HOOK)

    def __call__(self, at: int, way: str) -> tuple[dict[str, Any], int]:
        """The campaign's outcome, and how many changes its first coordinator made."""
        self._number += 1
        place = self._home / f"{self._number}"
        place.mkdir()
        (place / "toy.toml").write_text(CAMPAIGN)
        cut = {"TEST_CUT_AT": f"{at}", "TEST_CUT_WAY": way}
        path = f"{self._home / 'hook'}:{REPOSITORY}"
        words = ("campaign", "run", "toy.toml", "--workers", "1", "--json")
        ended = subprocess.run(
            [sys.executable, "-m", "hpc_toolkit", *words],
            cwd=place,
            env={**os.environ, **cut, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        whole = ended.returncode == 0 and ended.stderr.startswith("runs/toy: 14 items done in ")
        assert whole, f"{way} at change {at}: {ended}"
        count = int.from_bytes((place / "seen").read_bytes()[:8], sys.byteorder)
        outcome: dict[str, Any] = json.loads(ended.stdout)
        # Measured seconds differ from run to run.
        del outcome["gpu_s"]
        return outcome, count


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_campaign_whose_coordinator_is_killed_anywhere_is_the_same(fast_dir: Path) -> None:
    workers, ways = LocalWorkers(fast_dir), ("kill before", "kill after")
    calm, changes = workers(1 << 40, "kill before")
    assert len(calm["sequence"]) == 5
    for at in range(1, changes + 1):
        outcome, count = workers(at, ways[at % 2])
        assert count == at, "it was not cut"
        assert outcome == calm, f"{ways[at % 2]} at change {at} of {changes}"
    tally.count("run, its coordinator", changes=changes, cuts=changes)
