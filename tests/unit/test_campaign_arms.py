"""Campaigns over any arms: their names, features and filters, a user's policy, known results."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.bandit.arms import kind_of
from hpc_toolkit.campaign.search import make_arms, policy_of
from hpc_toolkit.campaign.settings import Campaign, read_campaign
from hpc_toolkit.campaign.summary import search_so_far
from hpc_toolkit.cli.campaigns import make_campaign_run
from hpc_toolkit.errors import ConfigError, WorkloadError
from hpc_toolkit.results.gather import gather
from hpc_toolkit.run import Run
from hpc_toolkit.worker.loading import load_workload
from tests.unit.playedcampaign import NOOP, Play, campaign_of, work

GRID = "grid = { lr = [0.001, 0.01, 0.1], depth = [2, 4, 6, 8], model = ['a', 'b'] }"


def campaign(directory: Path, arms: str, search: str = "budget = 6", **more: str) -> Campaign:
    """A campaign over ``arms``, read from a file as a user would write it."""
    tables = {"tasks": f"workload = '{NOOP}'", **more}
    text = f"name = 'own'\n[arms]\n{arms}\n[search]\n{search}\n"
    text += "".join(f"[{name}]\n{keys}\n" for name, keys in tables.items())
    directory.mkdir(exist_ok=True)
    (directory / "own.toml").write_text(text)
    return read_campaign(directory / "own.toml")


def score(item: dict[str, Any]) -> float:
    """Best at lr 0.01, depth 6 and model b."""
    far: float = (math.log10(item["lr"]) + 2) ** 2 + (item["depth"] - 6) ** 2 / 8
    return 1 - far / 10 + 0.05 * int(item["model"] == "b")


def value_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"score": score(item), "stderr": 0.01}


def test_arms_come_from_a_grid_a_file_or_a_function(tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text("lr,depth\n0.1,2\n0.01,4\n")
    code = "def arms():\n    return ({'lr': 10.0**-k, 'depth': 2 * k} for k in (1, 2))\n"
    (tmp_path / "twoarms.py").write_text(code)
    grids = "grid = [{ lr = [0.1], depth = '2:2' }, { lr = [0.01], depth = [4] }]"

    found = [
        [arm.id for arm in campaign(tmp_path, arms, "budget = 1").arms()]
        for arms in ("file = 'two.csv'", "generate = 'twoarms:arms'", grids)
    ]

    assert found == [["depth=2,lr=0.1", "depth=4,lr=0.01"]] * 3


@pytest.mark.parametrize(
    ("arms", "says"),
    [
        ("", "arms: nothing names the arms"),
        (f"{GRID}\nfile = 'x.csv'", "arms: file and grid names the arms"),
        ("file = 'x.csv'", "arms: file: cannot read .*x.csv: No such file"),
        ("grid = { lr = [] }", r"arms: grid.lr: \[\] is not a list of values"),
        ("grid = {}", "arms: rows: .* is not a list of tables with at least one arm"),
        ("rows = [{ task = 1 }]", r"arms: rows\[0\]: an arm has the key 'task'"),
        ("rows = [{ lr = nan }]", r"arms: rows\[0\]: .*not JSON compliant"),
        ("rows = [{ lr = 1e200 }]", r"arms: rows\[0\]: .* is not a table of names and values"),
        ("rows = [{ at = 2026-01-01 }]", r"arms: rows\[0\]: .*not JSON serializable"),
        ("rows = [{ lr = 1 }, { lr = 1 }]", "two arms are called lr=1"),
        (f"{GRID}\nbaseline = {{ lr = 3 }}", "arms: baseline: no arm has lr=3"),
        (f"{GRID}\nbaseline = {{ rl = 3 }}", "arms: no arm has the key 'rl'"),
        (f"{GRID}\ngroup_by = 'modell'", "arms: no arm has the key 'modell'"),
        (f"{GRID}\nfeatures = {{ lr = 'logg' }}", "arms: features.lr: 'logg' is not one of"),
        (f"{GRID}\nbaseline = {{ lr = 2026-01-01 }}", "arms: baseline: .*not JSON serializable"),
        (f"{GRID}\nfeatures = {{ lr = [2026-01-01] }}", "features.lr: .*not JSON serializable"),
        ("grid = [{ a = [1] }, { b = [1] }]\ngroup_by = 'a'", "some arms have no key 'a'"),
        ("generate = 'absent:arms'", "no module named 'absent'"),
    ],
)
def test_arms_that_are_wrong_are_refused_by_place(tmp_path: Path, arms: str, says: str) -> None:
    with pytest.raises(Exception, match=says) as refused:
        campaign(tmp_path, arms, "budget = 1")
    assert hasattr(refused.value, "hint")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        *(([0.001, 0.01, 0.1], "log"), ([16, 32, 64, 128], "log"), ([2, 4, 6, 8], "linear")),
        *(([0.1, 0.2, 0.3, 0.4], "linear"), ([0, 1, 10, 100], "linear")),
        *(([True, False], "linear"), (["a", "b", None], "categories"), ([1, "a"], "categories")),
        *(([str(k) for k in range(13)], "none"), ([5, 5, 5], "none"), ([1, 1.0, True], "none")),
        ([1700000000000000000, 1700000000000000001, 1700000000000000512], "linear"),
    ],
)
def test_values_of_a_key_become_features_by_their_kind(values: list[Any], kind: str) -> None:
    assert kind_of(values) == kind


def test_a_search_over_settings_finds_the_best_and_compares_the_baseline(
    tmp_path: Path, play: Play
) -> None:
    arms = f"{GRID}\nbaseline = {{ lr = 0.1, depth = 2 }}"
    own = campaign(tmp_path, arms, "budget = 12\npending = 3")
    assert asdict(policy_of(own, make_arms(own)).rule)["scales"] == "each"
    played = play(own, value_of)
    played.coordinate()

    run = Run.open(played.root)
    assert list(run.view.stages) == ["tasks"]
    found = played.summary()
    state = search_so_far(Run.open(played.root).view, campaign_of(run))
    assert found.best is not None
    assert found.best.keys == {"lr": 0.01, "depth": 6, "model": "b"}
    assert found.best.arm == "depth=6,lr=0.01,model=b"
    assert state["best"] == asdict(found.best)
    counts = ("asked", "budget", "evaluated", "arms", "rounds", "evaluations", "ended")
    assert [state[name] for name in counts] == [12, 12, 12, 24, 4, 12, found.ended]
    assert state["rounds_since_best"] is not None
    assert [arm for arm, *_ in state["last"]] == list(reversed(found.sequence))[:8]
    assert found.baseline is None or found.baseline.keys["depth"] == 2
    row = run.results()[0]
    assert row["item"].keys() == {"lr", "depth", "model", "task"}
    assert row["item"]["task"] == "score"


OWN_POLICY = """
import random

class Cheapest:
    def __init__(self, arms, seed, key="depth"):
        self.order = sorted(arms, key=lambda arm: (arm.keys[key], arm.id))
        self.told = {}
    def tell(self, arm, reward):
        self.told[arm] = reward
    def ask(self, pending):
        open_arms = [arm.id for arm in self.order if arm.id not in {*self.told, *pending}]
        return open_arms[0] if open_arms else None

class Random(Cheapest):
    def ask(self, pending):
        return random.choice(self.order).id

class Later(Cheapest):
    def ask(self, pending):
        return random.choice(self.order).id if self.told else super().ask(pending)

class Stranger(Cheapest):
    def ask(self, pending):
        return "depth=99"

class Nothing(Cheapest):
    def ask(self, pending):
        return None

class Leaves(Cheapest):
    def ask(self, pending):
        raise SystemExit

class Repeats(Cheapest):
    def ask(self, pending):
        return self.order[0].id

class Breaks(Cheapest):
    def ask(self, pending):
        return 1 / 0
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Random", "asks differently when asked again|asked again for arm"),
        ("Later", "asks differently when asked again|asked again for arm"),
        ("Stranger", "requested 'depth=99', an unknown arm"),
        ("Nothing", "nothing would be evaluated: the policy requested nothing more"),
        ("Leaves", "failed: SystemExit"),
        ("Repeats", "asked again for arm 'depth=2,lr=0.001,model=a'"),
        ("Breaks", "failed: ZeroDivisionError"),
        ("Absent", "has no 'Absent'"),
    ],
)
def test_a_users_policy_that_cannot_work_is_refused_at_once(
    tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / "badpolicy.py").write_text(OWN_POLICY)
    own = campaign(tmp_path, GRID, f"policy = 'badpolicy:{name}'\nbudget = 5")

    with pytest.raises(Exception, match=says):
        make_campaign_run(tmp_path / "r", own)
    assert not (tmp_path / "r").exists()


def test_metrics_of_an_earlier_run_are_features(tmp_path: Path, fast_dir: Path, play: Play) -> None:
    arms: list[dict[str, Any]] = [
        {"lr": lr, "depth": depth, "model": model}
        for lr in (0.001, 0.01, 0.1)
        for depth in (2, 4, 6, 8)
        for model in "ab"
    ]

    def measured(name: str, items: list[dict[str, Any]]) -> Campaign:
        run = Run.create(fast_dir / name, items, workload=NOOP)
        work(run.root, lambda item: {"entropy": item["lr"] * item["depth"]})
        search = "budget = 6\nmetrics = ['entropy']\noptions = { features = 'all' }"
        return campaign(tmp_path, GRID, search, metrics=f"from = '{run.root}'")

    played = play(measured("all", arms), value_of)
    decisions = played.coordinate()

    assert list(Run.open(played.root).view.stages) == ["tasks"]
    assert decisions[0].metrics == {"entropy": [arm["lr"] * arm["depth"] for arm in arms]}

    few = measured("few", arms[:3])
    with pytest.raises(ConfigError, match="only 3 of 24 arms have 'entropy'"):
        make_campaign_run(tmp_path / "few", few)
    assert not (tmp_path / "few").exists()
    table = campaign(tmp_path, GRID, tasks=f"workload = '{NOOP}'\nfrom = '{tmp_path}/own.toml'")
    with pytest.raises(ConfigError, match=r"campaign: tasks: from: .*own\.toml is not a run"):
        make_campaign_run(tmp_path / "few", table)


def test_a_finished_search_is_extended_by_a_campaign_that_starts_from_it(
    tmp_path: Path, play: Play
) -> None:
    """More arms, another task and a larger budget: nothing that is known is evaluated again.

    The code of the first returns the score alone.
    """
    one = "workload = '" + NOOP + "'\nnames = ['a']"
    first = play(campaign(tmp_path, GRID, "budget = 6", tasks=one), score, name="first")
    first.coordinate()
    larger = GRID.replace("[2, 4, 6, 8]", "[2, 4, 6, 8, 10]")
    tasks = f"workload = '{NOOP}'\nnames = ['a', 'b']\nfrom = '{first.root}'"
    own = campaign(tmp_path, larger, "budget = 10\nexhaustive = true", tasks=tasks)
    second = play(own, value_of, name="second")
    assert second.killed(2)
    second.coordinate(campaign_of(Run.open(second.root)))

    rows = gather(Run.open(second.root).view, "tasks").rows
    assert len(rows) == 30 * 2 - 6
    found = second.summary()
    assert found.ended == "requested 10 arms, the budget is 10"
    assert found.exhaustive is not None
    assert found.exhaustive.keys == {"lr": 0.01, "depth": 6, "model": "b"}


@pytest.mark.parametrize(
    ("parameters", "names", "call"),
    [
        ("lr, depth, model", "", "keys but task"),
        ("lr, depth, model, task", "", "keys"),
        ("lr, task='x', **rest", "", "keys"),
        ("item", "", "item"),
        ("lr, depth, model, task", "names = ['a', 'b']", "keys"),
        ("lr, depth, model", "names = ['a', 'b']", "item 0 has the key 'task', which"),
        ("lr, steps", "", "item 0 has no key 'steps', which"),
    ],
)
def test_a_campaign_calls_its_function_with_the_keys_of_the_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, names: str, call: str
) -> None:
    monkeypatch.chdir(tmp_path)
    module = f"called_{abs(hash((parameters, names)))}"
    (tmp_path / f"{module}.py").write_text(f"def f({parameters}):\n    return locals()\n")
    own = campaign(tmp_path, GRID, tasks=f"workload = '{module}:f'\n{names}")

    if " " in call and "but" not in call:
        with pytest.raises(WorkloadError, match=call):
            make_campaign_run(tmp_path / "run", own)
        return
    run = make_campaign_run(tmp_path / "run", own)
    spec = Run.open(run.root).manifest.stages[0].workload
    assert spec.call == call
    item = {**next(iter(own.arms())).item(), "task": "score"}
    found = next(load_workload(spec).run(None, iter([item])))
    assert ("task" in str(found)) == (call != "keys but task")
