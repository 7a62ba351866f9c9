"""Arms and their features; observations, the best arm, races, and asks task by task."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from hpc_toolkit.bandit import (
    Arm,
    ArmTable,
    Observation,
    Policy,
    Pull,
    Recommendation,
    TaskSet,
    make_policy,
)
from hpc_toolkit.bandit.arms import with_metrics
from hpc_toolkit.bandit.asktell import RULES
from hpc_toolkit.bandit.racing import best_row, survivors
from hpc_toolkit.bandit.rule import Reward, Stream, TaskResults, rewards_of
from hpc_toolkit.errors import ConfigError

ARMS = ArmTable(tuple(Arm(word, word, (float(i),)) for i, word in enumerate("abcdef")), ("layer",))


def best_of(policy: Policy) -> Recommendation:
    """The best arm of a policy that knows one."""
    best = policy.best()
    assert best is not None
    return best


def told(arm: str, score: float, stderr: float | None = None) -> Observation:
    stderrs = {} if stderr is None else {"task": stderr}
    return Observation(arm, {"task": score}, stderrs)


def mean_reward(observation: Observation) -> Reward | None:
    """The mean over the tasks of one observation."""
    tasks = TaskSet(tuple(sorted({*observation.scores, *observation.failed})))
    results = TaskResults.empty(1, tasks)
    results.take(0, observation)
    return rewards_of(results, [0]).get(0)


def test_reward_is_the_mean_over_the_tasks_that_there_are_with_its_standard_error() -> None:
    seen = Observation("a", {"x": 0.2, "y": 0.6}, {"x": 0.03, "y": 0.04})
    half_failed = Observation("a", {"x": 0.2, "y": 0.4}, failed=("u", "v"))

    reward, other = mean_reward(seen), mean_reward(half_failed)

    assert reward is not None
    assert other is not None
    assert (reward.mean, reward.stderr, other.mean) == pytest.approx((0.4, 0.05 / 2, 0.3))


@pytest.mark.parametrize(
    ("given", "claim"),
    [
        ({"scores": {"x": math.nan}}, r"scores\['x'\] is nan"),
        ({"scores": {"x": math.inf}}, r"scores\['x'\] is inf"),
        ({"scores": {"x": "0.5"}}, r"scores\['x'\] is '0.5', not a number"),
        ({"scores": {"x": True}}, r"scores\['x'\] is True, not a number"),
        ({"scores": {"x": 1.0}, "stderrs": {"x": -0.1}}, r"stderrs\['x'\] is negative"),
        ({"scores": {"x": 1.0}, "seconds": {"x": -1}}, r"seconds\['x'\] is negative"),
        ({"scores": {"x": 1.0}, "stderrs": {"y": 0.1}}, "'y' has a standard error but no score"),
        ({"scores": {"x": 1.0}, "failed": ("x",)}, "'x' has a score and is called failed"),
        ({}, "it has neither scores nor failed tasks"),
    ],
)
def test_observation_with_an_unusable_value_is_refused(given: dict[str, Any], claim: str) -> None:
    with pytest.raises(ConfigError, match=f"arm 'a': .*{claim}|arm 'a': {claim}"):
        Observation("a", **given)


def test_observation_survives_json_exactly() -> None:
    seen = Observation("a", {"x": np.float64(0.1), "b": 1}, {"x": 1e-17}, {"z": 0.1 + 0.2}, ("z",))

    again = Observation.from_json(json.loads(json.dumps(seen.to_json(), allow_nan=False)))

    assert again == seen


def test_best_is_the_highest_mean_and_lists_ties_within_two_standard_errors() -> None:
    policy = make_policy("random", ARMS, 0)
    # Two combined standard errors are 2 * sqrt(0.03^2 + 0.04^2) = 0.1.
    for arm, score in {"a": 0.39, "b": 0.5, "c": 0.401, "d": 0.45}.items():
        policy.tell(told(arm, score, 0.03 if arm == "b" else 0.04))

    best = best_of(policy)

    assert (best.arm, best.mean, best.stderr) == ("b", 0.5, 0.03)
    assert best.ties == ("d", "c")


PAIRED = [
    # b is 0.01 lower on every task, so the tasks' own errors do not matter.
    ({"a": (0.1, 0.5, 0.9, 0.4), "b": (0.09, 0.49, 0.89, 0.39)}, ()),
    # a has no score on the last task, on which all are low; where both have one, b is better.
    ({"a": (0.7, 0.8, None), "b": (0.8, 0.9, 0.1), "c": (0.0, 0.1, 0.0)}, ("b",)),
]


@pytest.mark.parametrize(("scores", "ties"), PAIRED)
@pytest.mark.parametrize("stderr", [None, 0.2])
def test_ties_are_judged_by_paired_differences_over_the_common_tasks(
    scores: dict[str, tuple[float | None, ...]], ties: tuple[str, ...], stderr: Any
) -> None:
    names = tuple("xyzw"[: len(scores["a"])])
    policy = make_policy("random", ARMS, 0, tasks=TaskSet(names))
    for arm, values in scores.items():
        known = {
            name: value for name, value in zip(names, values, strict=True) if value is not None
        }
        errors = dict.fromkeys(known, stderr) if stderr else {}
        failed = tuple(name for name in names if name not in known)
        policy.tell(Observation(arm, known, errors, {}, failed))

    best = best_of(policy)

    assert (best.arm, best.ties) == ("a", ties)


@given(scores=st.lists(st.tuples(*[st.integers(-9, 9)] * 2), min_size=2, max_size=9))
def test_ties_are_those_of_the_paired_t_test(scores: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    names = tuple(f"t{n}" for n in range(len(scores)))
    policy = make_policy("random", ARMS, 0, tasks=TaskSet(names))
    for arm, values in zip("ab", zip(*scores, strict=True), strict=True):
        policy.tell(Observation(arm, dict(zip(names, map(float, values), strict=True))))
    behind = [first - second for first, second in scores]
    if len(set(behind)) == 1:
        p = 1.0 if behind[0] == 0 else 0.0
    else:
        p = float(stats.ttest_1samp(behind, 0.0).pvalue)

    tied = bool(best_of(policy).ties)

    assert tied == (p > 0.05) or 0.045 < p < 0.055


def test_unknown_arms_and_unusable_numbers_are_refused() -> None:
    policy = make_policy("random", ARMS, 0)

    with pytest.raises(ConfigError, match="unknown arm 'zz'"):
        policy.tell(told("zz", 0.5))
    with pytest.raises(ConfigError, match="unknown arm 'zz'"):
        policy.ask(1, ["zz"])
    with pytest.raises(ConfigError, match="requested -1 arms"):
        policy.ask(-1)
    seeds: list[Any] = [-1, 1.5, True, "1"]
    for seed in seeds:
        with pytest.raises(ConfigError, match="seed is"):
            make_policy("random", ARMS, seed)


ONE = TaskSet(("x",))


@pytest.mark.parametrize(
    ("name", "options", "says", "hint"),
    [
        *(("gp-ucb", {"beta": one}, "gp-ucb: beta is ", "") for one in (-1, math.nan, math.inf)),
        *(("gp-ucb", {"beta": one}, "gp-ucb: beta is ", "") for one in (10**400, "2")),
        *(("gp-ucb", {"initial": one}, "gp-ucb: initial is ", "") for one in (0, 2.5, True)),
        ("gp-ei", {"features": "none"}, "gp-ei: features is ", ""),
        ("gp-ucb", {"betta": 1.0}, "policy 'gp-ucb' has no option 'betta'", "did you mean 'beta'?"),
        ("random", {"beta": 1.0}, "policy 'random' has no option 'beta'", "it has no options"),
        ("random", {"tasks": TaskSet(())}, "the task set is empty", ""),
        ("racing", {"tasks": ONE, "c": -1}, "racing: c is -1", ""),
        ("racing", {"tasks": ONE, "first": 1}, "racing: first is 1", ""),
        ("racing", {"tasks": ONE, "block": 0}, "racing: block is 0", ""),
    ],
)
def test_make_policy_unusable_option_is_refused(
    name: str, options: dict[str, Any], says: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        make_policy(name, ARMS, 0, **options)

    assert caught.value.hint
    assert hint in caught.value.hint


def names(count: int) -> tuple[str, ...]:
    return tuple(f"t{task}" for task in range(count))


def arms(count: int) -> ArmTable:
    return ArmTable(tuple(Arm(f"a{arm}", "g", ()) for arm in range(count)), ())


def answered(arm: str, tasks: tuple[str, ...], scores: Mapping[str, float]) -> Observation:
    """NaN is a failed task."""
    good = {task: scores[task] for task in tasks if not math.isnan(scores[task])}
    return Observation(arm, good, failed=tuple(set(tasks) - set(good)))


def finish(policy: Policy, scores: NDArray[np.float64], batch: int = 10**6) -> list[list[str]]:
    """Tell what is asked until nothing is; the tasks that each arm was asked for, in order."""
    asked: list[list[str]] = [[] for _ in scores]
    while proposals := policy.ask(batch):
        for proposal in proposals:
            arm = int(proposal.arm[1:])
            row = dict(zip(names(len(scores[0])), scores[arm], strict=True))
            asked[arm] += proposal.tasks
            policy.tell(answered(proposal.arm, proposal.tasks, row))
    return asked


def race_by_hand(
    scores: NDArray[np.float64], order: list[int], c: float, first: int, block: int
) -> tuple[set[int], list[int]]:
    """Who is left, and on how many tasks each arm ran: the published formula in plain loops."""
    k_all = len(order)
    left, ran = set(range(len(scores))), [0] * len(scores)
    looks = [*range(first, k_all, block), k_all]
    for k in looks:
        for arm in left:
            ran[arm] = k
        means = {arm: sum(scores[arm][t] for t in order[:k]) / k for arm in left}
        best = max(sorted(left), key=lambda arm: means[arm])
        for arm in sorted(left - {best}):
            gaps = [scores[best][t] - scores[arm][t] for t in order[:k]]
            gap = sum(gaps) / k
            sd = math.sqrt(sum((one - gap) ** 2 for one in gaps) / (k - 1))
            if gap > c * sd / math.sqrt(k) * math.sqrt(1 - k / k_all):
                left.remove(arm)
        if len(left) == 1:
            break
    return left, ran


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("c", "first", "block"), [(2.5, 3, 1), (1.0, 2, 2), (0.0, 4, 5)])
def test_racing_drops_and_asks_as_the_formula_says(
    seed: int, c: float, first: int, block: int
) -> None:
    rng = np.random.default_rng([seed, 9])
    # Arms and tasks of their own level, as real tasks have, and noise of the arms' size.
    scores = rng.normal(size=(20, 1)) + rng.normal(size=(1, 9)) + rng.normal(size=(20, 9))
    seconds = rng.permutation(9.0 + np.arange(9))
    policy = make_policy(
        "racing", arms(20), seed,
        tasks=TaskSet(names(9), tuple(seconds)), c=c, first=first, block=block,
    )  # fmt: skip
    order = np.argsort(seconds).tolist()

    asked = finish(policy, scores, batch=1 + seed % 7)

    left, ran = race_by_hand(scores, order, c, first, block)
    assert [len(tasks) for tasks in asked] == ran
    assert all(tasks == [f"t{task}" for task in order[: len(tasks)]] for tasks in asked)
    best = best_of(policy)
    assert {int(best.arm[1:])} == left


@given(
    scores=arrays.arrays(
        np.float64, st.tuples(st.integers(1, 8), st.integers(1, 6)),
        elements=st.floats(-1e6, 1e6) | st.just(math.nan),
    ),
    c=st.floats(0, 5),
    more=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_racing_never_drops_the_leader(scores: NDArray[np.float64], c: float, more: int) -> None:
    """Whatever failed, unless every arm has lost most of its tasks."""
    tasks = scores.shape[1]
    usable = np.flatnonzero(2 * np.isnan(scores).sum(axis=1) <= tasks)

    left = survivors(scores, tasks + more, c)

    assert set(left) <= set(usable.tolist())
    if usable.size:
        assert usable[best_row(scores[usable])] in left


def test_racing_that_drops_nobody_ends_with_the_exact_best_mean() -> None:
    scores = np.random.default_rng(0).normal(size=(9, 7))
    policy = make_policy("racing", arms(9), 0, tasks=TaskSet(names(7), (1.0,) * 7), c=1e9)

    asked = finish(policy, scores)

    best = best_of(policy)
    exact = [math.fsum(row) / 7 for row in scores.tolist()]
    assert best.mean == max(exact)
    assert best.arm == f"a{int(np.argmax(exact))}"
    assert best.tasks == names(7)
    assert all(len(tasks) == 7 for tasks in asked)


def test_race_in_which_all_arms_fail_asks_for_all_tasks_and_has_no_best() -> None:
    """Only after the last task is it certain that none of them tells anything."""
    policy = make_policy("racing", arms(3), 0, tasks=TaskSet(names(4), (1.0,) * 4))

    asked = finish(policy, np.full((3, 4), math.nan))

    assert [len(tasks) for tasks in asked] == [4, 4, 4]
    assert policy.best() is None


@pytest.mark.parametrize("witness", [None, "timed", "untimed"])
def test_race_leaves_out_tasks_that_failed_on_all_arms_and_takes_the_next(
    witness: str | None,
) -> None:
    """The cheapest tasks, of a data set that is not there. With a witness, one arm came through
    them before it went: that arm is the worst, and must not win for having been there."""
    lost = 3
    rng = np.random.default_rng(lost)
    scores = np.sort(rng.normal(size=12))[:, None] + 0.01 * rng.normal(size=(12, 9))
    seconds = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    timed = TaskSet(names(9), () if witness == "untimed" else seconds)
    # The first arm is the one that is asked how long the tasks take.
    pilots = (np.random.default_rng([seed, Stream.PILOT]).permutation(12) for seed in range(99))
    seed = next(seed for seed, order in enumerate(pilots) if order[0] == 0)
    policy = make_policy("racing", arms(12), seed, tasks=timed)
    gone = scores.copy()
    gone[1 if witness else 0 :, :lost] = math.nan

    while proposals := policy.ask(99):
        for proposal in proposals:
            row = dict(zip(names(9), gone[int(proposal.arm[1:])], strict=True))
            seen = answered(proposal.arm, proposal.tasks, row)
            took = {task: seconds[int(task[1:])] for task in proposal.tasks}
            policy.tell(Observation(seen.arm, seen.scores, {}, took, seen.failed))

    best = best_of(policy)
    assert best.arm == "a11"
    assert set(best.tasks) <= set(names(9)) - set(names(lost))


TASKS = TaskSet(("slow", "quick", "middle", "long", "short"), (9.0, 1.0, 4.0, 16.0, 2.0))
UNTIMED = TaskSet(TASKS.names)

VARIANTS: dict[str, dict[str, Any]] = {
    "random": {},
    "gp-ucb": {},
    "gp-ei": {},
    "racing": {},
    "racing in blocks": {"c": 1.0, "first": 2, "block": 2},
    "racing untimed": {"tasks": UNTIMED},
}
"""Every kind of policy, and what it is made with."""

every_variant = pytest.mark.parametrize("variant", VARIANTS)
campaigns = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 2**64)
some_tasks = st.just(list(TASKS.names)) | st.lists(st.sampled_from(TASKS.names), min_size=1)


def grid(steps: int, layers: int) -> ArmTable:
    arms = [
        Arm(f"s{step}/l{layer}", f"s{step}", (float(step), float(layer)))
        for step in range(steps)
        for layer in range(layers)
    ]
    return ArmTable(tuple(arms), ("log1p_step", "layer"))


tables = st.builds(grid, st.integers(1, 4), st.integers(1, 4))


def made(variant: str, table: ArmTable, seed: int) -> Policy:
    name = variant.partition(" ")[0]
    return make_policy(name, table, seed, **{"tasks": TASKS, **VARIANTS[variant]})


def whole(table: ArmTable, arm: str) -> Observation:
    """A result that depends on the arm alone: with ties, failed tasks, and arms that fail."""
    index = table.index(arm)
    names = TASKS.names
    failed = {task for i, task in enumerate(names) if (3 * index + i) % 8 == 7 or index % 9 == 8}
    scores = {
        task: ((5 * index) % 7) / 7 + 0.05 * ((index * i) % 5)
        for i, task in enumerate(names)
        if task not in failed
    }
    seconds = {task: (1 + index % 3) * TASKS.seconds[i] for i, task in enumerate(names)}
    return Observation(arm, scores, dict.fromkeys(scores, 0.01), seconds, tuple(failed))


def part(seen: Observation, tasks: Sequence[str]) -> Observation:
    """What an observation says of some tasks."""
    wanted = set(tasks)
    return Observation(
        seen.arm,
        {task: value for task, value in seen.scores.items() if task in wanted},
        {task: value for task, value in seen.stderrs.items() if task in wanted},
        {task: value for task, value in seen.seconds.items() if task in wanted},
        tuple(wanted.intersection(seen.failed)),
    )


def evaluations(table: ArmTable, told: Sequence[Pull], pull: Pull) -> list[tuple[str, str]]:
    """The (arm, task) pairs that a pull stands for, after these."""
    before = {(one.arm, task) for one in told for task in one.tasks or TASKS.names}
    if pull.tasks:
        return [(pull.arm, task) for task in pull.tasks]
    return [(pull.arm, task) for task in TASKS.names if (pull.arm, task) not in before]


@every_variant
@campaigns
@given(table=tables, seed=seeds, batch=st.integers(1, 6), data=st.data())
def test_campaign_evaluates_each_task_of_an_arm_at_most_once_and_ends(
    variant: str, table: ArmTable, seed: int, batch: int, data: st.DataObject
) -> None:
    """Asks of any size with results that come back in any order and number."""
    policy = made(variant, table, seed)
    asked: list[Pull] = []
    done: list[tuple[str, str]] = []
    pending: list[Pull] = []
    while True:
        new = policy.ask(batch, pending)
        assert len(new) <= batch
        for pull in new:
            done += evaluations(table, asked, pull)
            asked.append(pull)
        pending += new
        if not new and not pending:
            break
        # A policy that waits must be told something.
        least = 0 if new else 1
        back = data.draw(st.lists(st.sampled_from(pending), unique=True, min_size=least))
        for pull in back:
            policy.tell(part(whole(table, pull.arm), pull.tasks or TASKS.names))
            pending.remove(pull)

    assert len(set(done)) == len(done)
    assert {arm for arm, _ in done} == set(table.ids)
    if variant in RULES:
        assert len(done) == len(table.ids) * len(TASKS.names)


@every_variant
@campaigns
@given(table=tables, seed=seeds, data=st.data())
def test_ask_depends_on_what_is_known_and_not_on_how_it_was_told(
    variant: str, table: ArmTable, seed: int, data: st.DataObject
) -> None:
    """Whole tells, tells of one task each in another order, repeats and lost asks are the same."""
    tells = [
        part(whole(table, arm), data.draw(some_tasks))
        for arm in data.draw(st.lists(st.sampled_from(table.ids), unique=True))
    ]
    pending = [
        Pull(arm, tuple(data.draw(st.lists(st.sampled_from(TASKS.names), unique=True))))
        for arm in data.draw(st.lists(st.sampled_from(table.ids), max_size=4))
    ]
    first, second = made(variant, table, seed), made(variant, table, seed)
    for seen in tells:
        first.tell(seen)
    pieces = [part(seen, [task]) for seen in tells for task in {*seen.scores, *seen.failed}]
    for piece in data.draw(st.permutations(pieces)):
        second.ask(2)
        second.tell(piece)
        second.tell(piece)

    expected = first.ask(4, pending)

    assert second.ask(4, pending[::-1] + pending) == expected
    assert second.best() == first.best()
    assert second.stop(pending) == first.stop(pending)
    taken = {(pull.arm, task) for pull in pending for task in pull.tasks or TASKS.names}
    taken |= {(seen.arm, task) for seen in tells for task in (*seen.scores, *seen.failed)}
    assert taken.isdisjoint((p.arm, task) for p in expected for task in p.tasks)


@every_variant
@pytest.mark.parametrize("told", [0, 7, 16])
def test_ask_of_several_equals_asks_of_one_with_the_others_pending(variant: str, told: int) -> None:
    table = grid(4, 4)
    policy = made(variant, table, 5)
    for arm in table.ids[:told]:
        tasks = TASKS.names[:3] if told < 16 else ("quick", "short")
        policy.tell(part(whole(table, arm), TASKS.names if variant in RULES else tasks))
    one_by_one: list[Pull] = []

    for _ in range(9):
        one_by_one += policy.ask(1, one_by_one)

    assert policy.ask(9) == one_by_one


def test_best_compares_partly_told_arms_over_tasks_that_all_of_them_have() -> None:
    """The first arm has the highest score, of another task than the other two."""
    policy = make_policy("random", grid(1, 4), 0, tasks=TASKS)
    policy.tell(Observation("s0/l0", {"quick": 0.9}))
    policy.tell(Observation("s0/l1", {"slow": 0.2}))

    alone = best_of(policy)
    policy.tell(Observation("s0/l2", {"slow": 0.3}))
    both = best_of(policy)

    assert (alone.arm, alone.tasks) == ("s0/l0", ("quick",))
    assert (both.arm, both.tasks) == ("s0/l2", ("slow",))


@every_variant
@campaigns
@given(seed=seeds, data=st.data())
def test_best_is_known_as_soon_as_an_arm_has_as_many_scores_as_failures(
    variant: str, seed: int, data: st.DataObject
) -> None:
    table = grid(2, 3)
    policy = made(variant, table, seed)
    outcomes = st.sampled_from(("score", "failed", "failed", "not told"))
    for arm in table.ids:
        found = {task: data.draw(outcomes) for task in TASKS.names}
        scores = {task: 0.5 for task, what in found.items() if what == "score"}
        failed = tuple(task for task, what in found.items() if what == "failed")
        if scores or failed:
            policy.tell(Observation(arm, scores, failed=failed))
        if scores and len(scores) >= len(failed):
            assert policy.best() is not None


@pytest.mark.parametrize(
    "other",
    [
        Observation("s0/l0", {"quick": 0.6}),
        Observation("s0/l0", {"quick": 0.5}, {"quick": 0.1}),
        Observation("s0/l0", {"quick": 0.5}, seconds={"quick": 2.0}),
        Observation("s0/l0", failed=("quick",)),
    ],
)
def test_tell_of_another_result_of_a_task_is_refused_and_changes_nothing(
    other: Observation,
) -> None:
    policy = make_policy("random", grid(1, 1), 0, tasks=TASKS)
    policy.tell(Observation("s0/l0", {"quick": 0.5}))
    before = policy.best()

    with pytest.raises(ConfigError, match="arm 's0/l0' has another result of"):
        policy.tell(other)

    assert policy.best() == before


NAN = math.nan

TABLE = ArmTable(tuple(Arm(word, "g", (float(i),)) for i, word in enumerate("abcd")), ("layer",))


def table_of(*rows: tuple[float, ...], names: tuple[str, ...] = ("x", "y")) -> ArmTable:
    arms = [Arm(f"arm{i}", f"group{i % 2}", row) for i, row in enumerate(rows)]
    return ArmTable(tuple(arms), names)


def test_table_gap_becomes_the_median_and_an_indicator() -> None:
    values, names = table_of((1.0, 0.0), (2.0, NAN), (9.0, 4.0), (5.0, 1.0)).standardised

    assert names == ("x", "y", "y_missing")
    for column, filled in ((1, [0.0, 1.0, 4.0, 1.0]), (2, [0.0, 1.0, 0.0, 0.0])):
        standardised = (np.array(filled) - np.mean(filled)) / np.std(filled)
        np.testing.assert_allclose(values[:, column], standardised, atol=1e-12)


@given(st.lists(st.tuples(*[st.floats(-1e90, 1e90) | st.just(NAN)] * 2), min_size=1, max_size=8))
def test_standardised_features_have_no_gaps(rows: list[tuple[float, float]]) -> None:
    table = table_of(*rows)

    assert np.isfinite(table.standardised[0]).all()


METRIC = {arm: {"x": 1.0} for arm in "abcd"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ArmTable((), ("x",)), "there are no arms"),
        (lambda: ArmTable((Arm("a", "g", (1.0,)),) * 2, ("x",)), "arm id 'a' occurs 2 times"),
        (lambda: table_of((1.0, 2.0), names=("x", "x")), "feature name 'x' occurs 2 times"),
        (lambda: table_of((1.0, 2.0), (1.0,)), "arm 'arm1' has 1 features, but 2 are named"),
        (lambda: table_of((1.0, math.inf)), "arm 'arm0': feature 'y' is inf"),
        (lambda: table_of((1.0, -1e200)), r"arm 'arm0': feature 'y' is -1e\+200"),
        (lambda: table_of(("deep", 1.0)), r"arm 'arm0': features .* are not numbers"),  # type: ignore[arg-type]
        (lambda: with_metrics(TABLE, {"e": {"x": 1.0}}, ["x"]), "unknown arm 'e'"),
        (
            lambda: with_metrics(with_metrics(TABLE, METRIC, ["x"]), METRIC, ["x"]),
            "feature name 'metric:x' occurs 2 times",
        ),
    ],
)
def test_arms_that_cannot_be_are_refused(make: Callable[[], ArmTable], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_with_metrics_adds_a_named_column_per_metric_that_most_arms_have() -> None:
    rows: dict[str, dict[str, float | None]] = {
        arm: {"entropy": 10.0 + i, "curvature": -i} for i, arm in enumerate("abcd")
    }
    few: dict[str, dict[str, float | None]] = {"a": {"x": 1, "y": 2, "z": None}, "b": {"y": 2}}

    table = with_metrics(TABLE, rows, ["entropy", "curvature"])

    assert table.feature_names == ("layer", "metric:entropy", "metric:curvature")
    assert table.features.tolist() == [[i, 10.0 + i, -i] for i in range(4)]
    assert table.ids == TABLE.ids
    assert with_metrics(TABLE, few, ["x", "y", "z"]).feature_names == ("layer", "metric:y")


def test_columns_of_metrics_that_a_table_lacks_are_refused() -> None:
    policy = make_policy("gp-ucb", TABLE, 0, features="metrics")

    with pytest.raises(ConfigError, match="the arms have no metrics as features"):
        policy.ask(1)
