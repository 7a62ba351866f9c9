"""Whatever a function returns: its item is done after one attempt, and readers get it back."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.errors import RunError
from hpc_toolkit.results.tables import write_table
from hpc_toolkit.run import Run
from hpc_toolkit.system.jsonlines import decode
from tests.integration.kinds_of_results import KINDS, NOT_STORED, Kind
from tests.integration.realrun import Hpctk

ITEMS = [{"kind": name} for name in (*KINDS, NOT_STORED)]


def called(hpctk: Hpctk, *words: object) -> None:
    ended = hpctk(*words)
    assert ended.code == 0, ended.err


@pytest.mark.slow
def test_a_result_of_any_kind_is_done_at_once_and_comes_back(hpctk: Hpctk) -> None:
    """One run has every kind: its processes import torch, pandas and polars once."""
    kinds = import_module("kinds_of_results")  # by the name that workers have for it
    Path("items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    called(hpctk, "init", "run", "--workload", "kinds_of_results:give", "--items", "items.jsonl")
    called(hpctk, "work", "run")
    run = Run.open("run")
    rows = {row["item"]["kind"]: row for row in run.table()}

    for name, kind in kinds.KINDS.items():
        try:
            _comes_back(rows[name], kind, hpctk.cwd, run)
            assert kinds.same(run.values.restored(deepcopy(rows[name]))["value"], kind.make())
        except AssertionError as error:
            error.add_note(f"kind of result: {name}")
            raise
    _has_failed_by_its_name(rows[NOT_STORED], run)


def _comes_back(row: dict[str, Any], kind: Kind, home: Path, run: Run) -> None:
    assert (row["state"], row["attempts"], row["error"]) == ("done", 1, None)
    _is_shown(row["value"], kind.json)
    _is_written(row, kind, home, run)


def _is_shown(found: Any, wanted: Any) -> None:
    if isinstance(wanted, str) and not isinstance(found, dict | list):
        assert str(found).startswith(wanted)
    else:
        assert (type(found), found) == (type(wanted), wanted)


def _is_written(row: dict[str, Any], kind: Kind, home: Path, run: Run) -> None:
    import pyarrow.parquet as pq

    paths = {suffix: home / f"row.{suffix}" for suffix in ("jsonl", "csv", "parquet")}
    for path in paths.values():
        write_table(path, [row], run.values)

    assert decode(paths["jsonl"].read_text()) == row
    (cells,) = csv.DictReader(paths["csv"].read_text().splitlines(keepends=True))
    columns = [name for name in cells if name.startswith("value")]
    found = pq.read_schema(paths["parquet"])
    assert str(found.field("error").type) == "string"
    if not columns:
        assert kind.json == {}
        return
    assert cells[columns[0]].startswith(str(kind.csv))
    assert str(found.field(columns[0]).type) == kind.parquet


def _has_failed_by_its_name(row: dict[str, Any], run: Run) -> None:
    assert (row["state"], row["attempts"], row["value"]) == ("failed", 1, None)
    assert row["error"].startswith("value.model['lock'] is a lock, which cannot be stored: ")
    journal = run.paths.journal(row["worker"]).read_text().splitlines()
    line = next(record for record in map(json.loads, journal) if record["type"] == "permanent")
    start, end = line["log"]
    printed = run.paths.worker_log(row["worker"]).read_bytes()[start:end].decode()
    assert f"makes {NOT_STORED}" in printed


BOMB = """
import math
import os
class Bomb:
    def __reduce__(self):
        return os.open, ("exploded", os.O_CREAT)
def give(item):
    return {"score": 1, "bomb": Bomb()}
"""


def test_no_command_loads_a_pickle_and_python_only_of_a_trusted_run(hpctk: Hpctk) -> None:
    Path("bomb.py").write_text(BOMB)
    Path("items.jsonl").write_text('{"n": 1}\n')
    called(hpctk, "init", "run", "--workload", "bomb:give", "--items", "items.jsonl")
    called(hpctk, "work", "run")

    for words in (
        ("status", "run", "--json"),
        ("report", "run"),
        ("explain", "run", "--item", "0"),
        ("logs", "run", "--item", "0"),
        ("doctor", "run"),
        *(("gather", "run", "-o", f"rows.{s}") for s in ("jsonl", "json", "csv", "parquet")),
    ):
        called(hpctk, *words)
    run = Run.open("run")
    assert run.columns()["value.bomb"] == ["<bomb.Bomb, 46 B>"]
    Path("run").chmod(0o777)
    with pytest.raises(RunError, match="run is world-writable, and its code would run as you"):
        run.results()
    assert not Path("exploded").exists()
    Path("run").chmod(0o755)
    os.close(run.results()[0]["value"]["bomb"])
    assert Path("exploded").exists()


def test_a_result_that_cannot_be_restored_is_an_error_in_its_row_only(
    hpctk: Hpctk, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("gone.py").write_text("class Gone: pass\n")
    Path("ends.py").write_text("class Ends:\n    def __reduce__(self): return exit, (3,)\n")
    Path("mine.py").write_text(
        "import gone, ends\n"
        "def give(n): return [gone.Gone(), ends.Ends(), {'n': n}][n] if n < 3 else float('nan')\n"
    )
    called(hpctk, "init", "run", "--workload", "mine:give", "--count", "4", "--key", "n")
    called(hpctk, "work", "run")
    Path("gone.py").unlink()

    missing, ended, plain, number = (row["value"] for row in Run.open("run").results())

    assert isinstance(missing, RunError)
    said = (
        """the result of {"n":0} cannot be restored: ModuleNotFoundError: No module named 'gone'"""
    )
    assert missing.message == said
    assert missing.hint.startswith("install gone, or add its directory to PYTHONPATH")
    assert isinstance(ended, RunError)
    assert plain == {"n": 2}
    assert math.isnan(number)
    warning = f"warning: 2 results of run not restored: {said}; install gone"
    assert warning in capsys.readouterr().err


def test_a_value_file_that_is_damaged_is_named(hpctk: Hpctk) -> None:
    Path("items.jsonl").write_text('{"kind": "object"}\n{"kind": "large array"}\n')
    called(hpctk, "init", "run", "--workload", "kinds_of_results:give", "--items", "items.jsonl")
    called(hpctk, "work", "run", "--workers", "1")
    (path,) = Path("run/journals").glob("*.values")
    data = path.read_bytes()

    for damage, said in ((data[:-1], "cut off"), (b"x" + data[1:], "checksum is wrong"), (b"", "")):
        path.write_bytes(damage)
        values = [row["value"] for row in Run.open("run").results()]
        lost = [one.message for one in values if isinstance(one, RunError)]
        assert len(lost) == (2 if not damage else 1)
        assert re.search(rf"values does not have bytes \d+ to \d+ .*{said}", lost[0])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_results_of_2_gb_and_of_30_mb_of_text_come_back(hpctk: Hpctk) -> None:
    Path("items.jsonl").write_text('{"bytes": 2147483648}\n{"text": 31457280}\n')
    called(
        hpctk, "init", "run", "--workload", "kinds_of_results:give_large", "--items", "items.jsonl"
    )
    called(hpctk, "work", "run", "--workers", "1")

    array, text = (row["value"] for row in Run.open("run").results())

    assert (array.dtype, array.shape, int(array[-1])) == (np.uint8, (2**31,), 7)
    assert len(text) == 31457280
    called(hpctk, "gather", "run", "-o", "rows.csv")
    assert Path("rows.csv").stat().st_size > 31457280
