"""What 'hpctk submit' says of a job: its request, its cost, and the items left of its run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from hpc_toolkit.cli import submit as submit_commands
from hpc_toolkit.cli.help import Commands
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.nodes import Ask, ask_of, asked_line
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.render.spec import ScriptSpec
from hpc_toolkit.submit.outlook import left_lines, sized
from tests.toyrun import ToyRun
from tests.unit.playedcampaign import Played, toy

if TYPE_CHECKING:
    from pathlib import Path

SITE = Cluster(
    name="site",
    file="site.toml",
    nodes=64,
    gpus_per_node=4,
    price_per_gpu_hour=2.0,
    currency="USD",
    max_walltime_s=24 * 3600,
)
FACTS = """\
description = "a site"
nodes = 64
gpus_per_node = 4
price_per_gpu_hour = 2.0
currency = "USD"
"""


def ask(nodes: int, *, hours: float = 4, site: Cluster = SITE, **more: Any) -> Ask:
    spec = ScriptSpec(
        python="/usr/bin/python3",
        nodes=nodes,
        gpus_per_node=site.gpus_per_node or 0,
        ntasks_per_node=4,
        time=int(hours * 3600),
    )
    return ask_of(spec, site, **more)


def measured(root: Path, *, items: int = 136, done: int = 100, sealed: bool = True) -> Run:
    """A run whose first items took an hour each, by a worker that has left."""
    toy = ToyRun(root / "run", items, unit=1, sealed=sealed)
    worker = toy.worker("w1")
    for item in range(done):
        worker.claim(toy.unit_name(item))
        worker.attempt(item, seconds=3600.0)
        worker.release(seconds=3600.0)
    worker.finish()
    return toy.reopen()


def test_the_request_is_shown_with_the_cost_of_all_of_its_time() -> None:
    plain = Cluster(name="plain", file="plain.toml")

    assert asked_line(ask(8)) == (
        "requests 8 nodes with 4 GPUs for 04:00:00: up to 128 GPU-hours, 256 USD"
    )
    assert asked_line(ask(1, hours=0.5, site=plain, jobs=3)) == (
        "each of 3 jobs requests 1 node for 00:30:00: up to 0.50 node-hours;"
        " together 1.50 node-hours"
    )


def array(elements: str) -> Ask:
    spec = ScriptSpec(
        python="/usr/bin/python3",
        gpus_per_node=4,
        ntasks_per_node=4,
        time=12 * 3600,
        array=elements,
    )
    return ask_of(spec, SITE)


SEARCH = {"policy": "random", "budget": 8, "pending": 2}


def campaign(root: Path, patch: pytest.MonkeyPatch, waits: int, **more: Any) -> Run:
    """A campaign of 20 arms and 3 tasks whose coordinator was killed."""
    search = {**SEARCH, **more.pop("search", {})}
    assert Played(root, toy(search, **more), patch).killed(waits)
    return Run.open(root)


def test_a_time_limit_that_is_too_short_is_named_with_one_that_is_enough(tmp_path: Path) -> None:
    run = measured(tmp_path)

    (short,) = left_lines(run, ask(3, hours=2))[1]
    (longest,) = left_lines(run, ask(3, hours=0.5))[1]
    chain = left_lines(run, ask(3, hours=2, jobs=9, chain=True))[1]
    chained = left_lines(run, ask(3, hours=0.5, jobs=99, chain=True))[1]

    assert short.startswith("02:00:00 is too short for all items; --time 0")
    assert longest.startswith("00:30:00 is probably too short for the longest item")
    assert chain == []
    assert chained == [longest]


def test_nodes_without_a_unit_are_told_unless_items_may_follow(tmp_path: Path) -> None:
    run = measured(tmp_path)

    one, two = ask(10, hours=12), ask(5, hours=12, jobs=2)

    assert left_lines(run, one)[1] == [
        "nodes will be idle: 36 units for 40 workers; 9 nodes are enough"
    ]
    assert left_lines(run, two)[1] == left_lines(run, one)[1]
    assert left_lines(measured(tmp_path / "open", sealed=False), one)[1] == []


@pytest.mark.parametrize(
    ("done", "hours", "message"),
    [
        (0, 6.0, "has a result, so durations are unknown"),
        (100, 0.5, "--size-for 30 min 00 s: 36 items are left, and 9 nodes may take "),
    ],
)
def test_a_time_for_which_no_size_is_known_is_refused(
    tmp_path: Path, done: int, hours: float, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sized(measured(tmp_path, done=done), ask(1), hours * 3600)

    assert message in caught.value.message
    assert caught.value.hint


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTK_RUN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm
    (tmp_path / "site.toml").write_text(FACTS)
    return tmp_path


def call(*words: str) -> Result:
    app = Commands(help="")
    submit_commands.register(app)
    given = ["submit", "--cluster", "./site.toml", "--gpus-per-node", "4", "--dry-run", *words]
    return CliRunner().invoke(app, given)


def test_submit_shows_the_request_before_it_sends(here: Path) -> None:
    measured(here)

    found = call("--run", "run", "--nodes", "10", "--time", "2:00:00")

    lines = found.stderr.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("requests 10 nodes"))
    assert lines[first + 1].startswith("36 items are left: ")
    assert lines[first + 2].startswith("warning: 02:00:00 is too short for all items")
    assert lines[first + 3].startswith("warning: nodes will be idle")
    assert lines[first + 4].startswith("would run: sbatch")


def test_submit_sizes_the_job(here: Path) -> None:
    measured(here)

    found = call("--run", "run", "--size-for", "8h")

    assert found.exit_code == 0, found.exception
    assert re.search(r"#SBATCH --nodes=[23]\n", found.stdout)
    assert "#SBATCH --time=0" in found.stdout
    assert "too short" not in found.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "2"), "--size-for and --nodes exclude each other"),
        (("--time", "1h"), "--size-for and --time exclude each other"),
        (("--array", "0-3"), "--size-for and --array exclude each other"),
        (("--jobs", "2"), "--size-for and --jobs exclude each other"),
        (("command", "--", "true"), "--size-for: command has no list of items"),
    ],
)
def test_a_size_is_chosen_alone_and_for_a_list(
    here: Path, words: tuple[str, ...], message: str
) -> None:
    measured(here)

    error = call("--size-for", "6h", *words).exception

    assert isinstance(error, ConfigError), repr(error)
    assert message in error.message
