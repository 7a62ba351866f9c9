"""Tables of recorded scores: what is read, and which file is refused with which words."""

from __future__ import annotations

import csv
import gzip
import io
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hpc_toolkit.bandit.arms import GEOMETRY_NAMES, Arm, ArmTable
from hpc_toolkit.bandit.bench.replay import ScoreTable
from hpc_toolkit.bandit.policy import TaskSet
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.results.scoretable import read_score_table

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "size,revision,layer,m_entropy,s_sts,s_topic,t_sts,t_topic,note"
ROWS = (
    "410m,step8,0,1.5,0.50,0.25,2.0,60.0,first",
    "410m,step8,2,nan,0.75,0.50,3.0,90.0,",
    "1.4b,main,1,,0.25,1.00,4.0,80.0,x",
)


def text(*rows: str, header: str = HEADER) -> str:
    return "\n".join([header, *rows]) + "\n"


def write(path: Path, content: str) -> Path:
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_table_is_read_alike_from_every_format(tmp_path: Path, name: str) -> None:
    table = read_score_table(write(tmp_path / name, text(*ROWS)))

    assert table.arms.ids == ("410m/step8/layer0", "410m/step8/layer2", "1.4b/main/layer1")
    assert tuple(arm.group for arm in table.arms.arms) == ("410m/step8", "410m/step8", "1.4b/main")
    assert table.arms.feature_names == GEOMETRY_NAMES
    expected = [
        [math.log(410e6), math.log(9), 0.0],
        [math.log(410e6), math.log(9), 1.0],
        [math.log(1.4e9), math.log(143_001), 1.0],
    ]
    np.testing.assert_allclose(table.arms.features, expected)
    assert table.tasks.names == ("sts", "topic")
    np.testing.assert_array_equal(table.scores, [[0.5, 0.25], [0.75, 0.5], [0.25, 1.0]])
    assert table.seconds is not None
    np.testing.assert_array_equal(table.seconds, [[2, 60], [3, 90], [4, 80]])
    assert table.stderrs is None
    np.testing.assert_array_equal(table.metrics["entropy"], [1.5, math.nan, math.nan])
    assert table.means.tolist() == [0.375, 0.625, 0.625]


def test_a_step_column_and_a_family_tell_what_revisions_do_not(tmp_path: Path) -> None:
    header = "family,size,revision,step,layer,s_a,e_a"
    rows = ("bert,110m,v1,,0,0.5,0.01", "gpt,110m,v1,70,3,0.25,0.02", "gpt,110m,v1,70,1,0.5,0.1")

    table = read_score_table(write(tmp_path / "t.csv", text(*rows, header=header)))

    assert tuple(arm.group for arm in table.arms.arms) == (
        "bert/110m/v1",
        "gpt/110m/v1",
        "gpt/110m/v1",
    )
    step, depth = table.arms.features[:, 1], table.arms.features[:, 2]
    np.testing.assert_allclose(step, [math.nan, math.log(71), math.log(71)])
    np.testing.assert_allclose(depth, [0.0, 1.0, 1 / 3])
    assert table.stderrs is not None
    assert table.stderrs.tolist() == [[0.01], [0.02], [0.1]]
    assert table.seconds is None


def test_a_table_is_read_alike_however_its_file_is_written(tmp_path: Path) -> None:
    plain = read_score_table(write(tmp_path / "plain.csv", text(*ROWS)))
    cells = [line.split(",") for line in (HEADER, *ROWS)]
    mixed = io.StringIO()
    writer = csv.writer(mixed, lineterminator="\r\n", quoting=csv.QUOTE_ALL)
    for row in cells:
        note = "one, two\nthree" if row[-1] == "first" else row[-1]
        writer.writerow([*row[3:-1][::-1], note, *row[:3][::-1]])

    table = read_score_table(write(tmp_path / "mixed.csv.gz", "\ufeff" + mixed.getvalue() + "\r\n"))

    assert table.arms.arms == plain.arms.arms
    assert table.tasks.names == plain.tasks.names[::-1]
    np.testing.assert_array_equal(table.scores, plain.scores[:, ::-1])
    assert table.seconds is not None
    assert plain.seconds is not None
    np.testing.assert_array_equal(table.seconds, plain.seconds[:, ::-1])
    np.testing.assert_array_equal(table.metrics["entropy"], plain.metrics["entropy"])


def spoilt(old: str, new: str) -> str:
    """The good table with one change."""
    good = text(*ROWS)
    assert old in good
    return good.replace(old, new, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (spoilt("0.75", "high"), r"t.csv, line 3, column 's_sts': 'high' is not a number"),
        (spoilt("0.75", "nan"), r"line 3, column 's_sts': 'nan' is missing"),
        (spoilt("0.75", "inf"), r"line 3, column 's_sts': 'inf' is out of range"),
        (spoilt("90.0", "-1"), r"line 3, column 't_topic': '-1' is out of range"),
        (spoilt("1.4b", "14x"), r"line 4, column 'size': '14x' is not a model's size"),
        (spoilt("1.5,0.50", "-1e200,0.50"), r"line 2, column 'm_entropy': '-1e200' is out of"),
        (
            spoilt("step8,2", f"step{'9' * 5000},2"),
            r"line 3, column 'revision': .*names no training",
        ),
        (
            text("410m,v1,0,1e300,0.5", header="size,revision,layer,step,s_a"),
            r"line 2, column 'step': '1e300' is out of range",
        ),
        (spoilt("main", "final"), r"line 4, column 'revision': 'final' names no training step"),
        (spoilt("main,1", "main,1.5"), r"line 4, column 'layer': '1.5' is not a whole number"),
        (spoilt("step8,2", "step8,0"), r"line 3, .*repeats arm '410m/step8/layer0' of line 2"),
        (spoilt("first\n", "first,more\n"), r"t.csv, line 2: 10 cells, the header has 9"),
        (spoilt(",80.0,x\n", ""), r"t.csv, line 4: 7 cells, the header has 9"),
        (spoilt("t_topic", "t_sts"), r"line 1: column 't_sts' occurs 2 times"),
        (spoilt("layer", "depth"), r"t.csv: no column 'layer'"),
        (text("410m,main,0", header="size,revision,layer"), r"no column with the scores of a task"),
        (text(), r"t.csv: no row"),
        ("", r"t.csv: no column 'size'"),
        ('a,"b\n', r"t.csv, line 1: unexpected end of data"),
    ],
)
def test_a_file_that_is_no_table_of_scores_is_refused_by_place(
    tmp_path: Path, content: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_score_table(write(tmp_path / "t.csv", content))


def small_table() -> ScoreTable:
    arms = tuple(Arm(f"a{index}", f"g{index // 2}", (float(index),)) for index in range(6))
    scores = np.arange(24.0).reshape(6, 4)
    seconds, stderrs = scores + 100.0, scores / 100.0
    metrics = {"rank": np.arange(6.0)}
    table = ArmTable(arms, ("x",))
    return ScoreTable(table, TaskSet(("p", "q", "r", "s")), scores, seconds, stderrs, metrics)


def test_a_table_with_wrong_numbers_is_refused() -> None:
    table = small_table()
    good, names, arms = table.scores, table.tasks, table.arms

    with pytest.raises(ConfigError, match=r"scores: nan at arm 1, task 2"):
        ScoreTable(arms, names, np.where(good == 6.0, np.nan, good))
    with pytest.raises(ConfigError, match=r"scores: 1e\+308 at arm 0, task 0"):
        ScoreTable(arms, names, np.full_like(good, 1e308))
    with pytest.raises(ConfigError, match=r"seconds: -1.0 at arm 0, task 0"):
        ScoreTable(arms, names, good, good - 1.0)
    with pytest.raises(ConfigError, match=r"stderrs: inf at arm 0, task 0"):
        ScoreTable(arms, names, good, None, np.full_like(good, np.inf))
    with pytest.raises(ConfigError, match=r"the table has no task"):
        ScoreTable(arms, TaskSet(()), np.zeros((6, 0)))
