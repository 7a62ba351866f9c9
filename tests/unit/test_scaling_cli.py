"""``hpctk scaling``: pages, files, exit codes, and what is refused before a rank starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpc_toolkit import cli
from hpc_toolkit.errors import ConfigError, HpcToolkitError, RunError
from hpc_toolkit.training.scaling.collectives import record_of
from tests.scripttext import batch_program
from tests.unit.test_scaling_records import record

PUBLISHED = Path(__file__).with_name("published_scaling.json")
V100 = "world_size,seconds\n1,480\n2,245\n4,128\n8,68\n"


def scaling(*words: str) -> Result:
    return CliRunner().invoke(cli.load_commands("scaling"), ["scaling", *words])


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "v100.csv"
    path.write_text(V100)
    return str(path)


def test_a_page_has_the_numbers_and_the_advice() -> None:
    found = scaling("analyze", str(PUBLISHED))

    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    assert "## 8 x V100" in lines
    assert "| 8 | 1 min 08 s | 7.06 | 88.2% | 0.1511 | +13.3% |" in lines
    assert "**Use 8** (fair on 8: 88.2% efficiency, at least 85% wanted)" in lines
    assert "**Use 4, not 8** (poor on 8: 75.0% efficiency, at least 85% wanted)" in lines
    assert (
        "**Use 8** (good on 8: 103.8% efficiency, at least 85% wanted; more than the ranks "
        "explain, see below)"
    ) in lines
    assert "| 8 x A100 | 4 | 3 h 30 min | 85.7% | 14.00 GPU-hours for the training |" in lines
    assert "| 4 | 5.500 | 3.77 | 94.2% | 0.2020 | +6.2% | $0.1212 |" in lines


@pytest.mark.parametrize(("wanted", "code"), [("0.88", 0), ("0.89", 1)])
def test_the_exit_code_says_whether_an_efficiency_is_below(
    table: str, wanted: str, code: int
) -> None:
    assert scaling("analyze", table, "--min-efficiency", wanted).exit_code == code
    assert scaling("analyze", table).exit_code == 0


def test_a_price_makes_costs_of_gpu_hours(table: str) -> None:
    found = scaling("analyze", table, "--price-per-gpu-hour", "3", "--json")

    (series,) = json.loads(found.stdout)["series"]
    row = series["rows"][3]
    assert row["cost"] == pytest.approx(3 * row["gpu_hours"])
    assert row["cost_per_1000"] is None
    assert series["verdict"]["world_size"] == 8
    assert series["advice"] == "Use 8 (fair on 8: 88.2% efficiency, at least 85% wanted)"
    assert 0.014 < series["serial_share"]["low"] < series["serial_share"]["share"] < 0.024


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("run", "-o", "d", "--world-sizes", "1,3"), "8 samples do not divide among 3"),
        (("run", "-o", "d", "--vary", "loader=1"), "'loader' cannot vary"),
        (("run", "-o", "d", "--time", "10"), "--time is for jobs"),
        (("run", "-o", "d", "--model", "decoder-1x3"), "'decoder-1x3' is not a decoder"),
        (("run", "-o", "d", "--force"), "--force is for jobs"),
        (("run", "-o", "d", "--cluster", "nowhere"), "nowhere"),
        (("run", "-o", "-", "--slurm"), "-o -: jobs need a directory for their records"),
        (("run", "-o", "TABLE/d"), "/d: cannot be written to: Not a directory"),
        (
            ("run", "-o", "d", "--slurm", "--price-per-gpu-hour", "3"),
            "--price-per-gpu-hour is for a table, which jobs have",
        ),
        (("run", "-o", "d", "--node-rank", "1"), "--node-rank: --master-addr is missing"),
        (("run", "-o", "d", "--start-timeout", "1m"), "--start-timeout: --node-rank is missing"),
        (("collectives", "--sizes", "1K,many"), "--sizes: 'many' is not a size"),
        (("collectives", "--collectives", "reduce"), "--collectives: 'reduce'"),
        (("collectives", "TABLE"), "no collective was measured"),
        (("collectives", "TABLE", "--world-size", "2"), "--world-size cannot be combined"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    table: str, words: tuple[str, ...], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    found = scaling(*(word.replace("TABLE", table) for word in words))

    assert isinstance(found.exception, ConfigError | RunError | HpcToolkitError)
    assert match in str(found.exception)
    assert not (tmp_path / "d").exists()


def test_what_a_measurement_sets_itself_is_no_option() -> None:
    for option in ("--nodes", "--array", "--stage", "--rank-restarts", "--run-dir"):
        found = scaling("run", "-o", "d", "--slurm", option, "2")
        # Versions of click differ in the colon and the quotes.
        refused = re.search(f"No such option:? '?{option}", found.output)
        assert (found.exit_code, bool(refused)) == (2, True), found.output


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("run", "-o", "d", "--backend", "mpi"), "one of nccl, gloo"),
        (("run", "-o", "d", "--ranks-per-node", "0"), "a number from 1 on"),
        (("analyze", "x.csv", "--price-per-gpu-hour", "nan"), "a number from 0 on"),
        (("analyze", "x.csv", "--min-efficiency", "inf"), "a number from 0 on"),
        (("collectives", "--iterations", "many"), "a number from 1 on"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_a_usage_error(
    words: tuple[str, ...], wanted: str
) -> None:
    found = scaling(*words)

    assert found.exit_code == 2
    assert f"Invalid value for '{words[-2]}': '{words[-1]}' is not {wanted}" in found.output


def test_names_of_tables_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    points = [{"world_size": 1, "value": 2}]
    (tmp_path / "t.json").write_text(json.dumps({"name": "a\n# b \033[2J", "points": points}))

    assert "## a # b \\x1b[2J\n" in scaling("analyze", str(tmp_path / "t.json")).stdout


def test_an_own_training_is_a_job_for_each_world_size_and_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "d/records").mkdir(parents=True)
    known = record(2, 1.0, 1, settings={"arguments": "--lr 1"})
    (tmp_path / "d/records/world-2-repeat-1.jsonl").write_text(json.dumps(known))
    words = ("--world-sizes", "1,2", "--repeats", "2", "--gpus-per-node", "2", "--cluster", "lab")
    own = ("--env", "A=b", "--dry-run", "--", "train.py", "--lr", "1")

    found = scaling("run", "-o", "d", "--resume", "--slurm", *words, *own)
    refused = scaling("run", "-o", "d", "--slurm", *words, "--model", "decoder-1x32", *own)

    assert found.exit_code == 0, found.exception
    lines = found.stdout.splitlines()
    assert [line for line in lines if line.startswith("#SBATCH --job-name")] == [
        f"#SBATCH --job-name=scaling-repeat-{name}" for name in ("0-1", "0-2", "1-1")
    ]
    scripts = found.stdout.split("#!/bin/bash")[1:]
    assert [batch_program(one)[-3:] for one in scripts] == [["train.py", "--lr", "1"]] * 3
    for name, value in (
        ("HPCTK_SCALING_RECORDS", tmp_path / "d/records/world-2-repeat-0.jsonl"),
        ("HPCTK_SCALING_REPEAT", 0),
        ("HPCTK_SCALING_CLUSTER", "lab"),
        ("A", "b"),
    ):
        assert f"export {name}={value}\n" in scripts[1]
    assert "--model is for the built-in training" in str(refused.exception)


def test_a_job_says_its_cluster_to_the_records_unless_nothing_is_known_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('description = "mine"\n')
    words = ("run", "-o", "d", "--slurm", "--dry-run", "--world-sizes", "1", "--cluster")

    named = [scaling(*words, name).stdout for name in ("lab", "generic", "mine.toml")]

    said = [" ".join(batch_program(text)).partition(" --cluster ")[2].split() for text in named]
    assert [one[:1] for one in said] == [["lab"], [], [str(tmp_path / "mine.toml")]]


def test_collectives_of_a_log_are_shown_as_a_table(tmp_path: Path) -> None:
    timed = record_of("all_reduce", size_bytes=4_000_000, seconds=0.001, world_size=4)
    line, damaged = json.dumps(timed), json.dumps({**timed, "seconds": None})
    deep = '{"kind": "hpctk.collectives", "a": ' + "[" * 100_000
    (tmp_path / "a.log").write_text(f"text\n0: {line}\n{line[:30]}\n{damaged}\n{deep}\n")

    found = scaling("collectives", str(tmp_path / "a.log"))

    assert found.stdout.splitlines()[2:] == ["| all_reduce | 4 | 3.8 MiB | 1000 us | 4 | 6 |"]
    (row,) = json.loads(scaling("collectives", str(tmp_path / "a.log"), "--json").stdout)["rows"]
    assert row["bus_bytes_per_s"] == pytest.approx(6e9)
