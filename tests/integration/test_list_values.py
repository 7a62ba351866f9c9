"""Values of lists, from a file or an option into a command or a function, and back into rows."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.queue.listfiles import each_item
from hpc_toolkit.queue.lists import grid
from tests.integration.realrun import Hpctk

NUMBERS = {
    "whole": "0 1 -2",
    "huge": "9007199254740993 123456789012345678901234567890 -18446744073709551617",
    "fraction": "0.1 -2.5 1.0",
    "exponent": "1e-05 1.5e+300 -1e+16",
    "zeros": "0.0 -0.0 0",
    "small": "5e-324 2.2250738585072014e-308 0.3",
    "mixed": "1 2.5 3",
    "true": "true false true",
}
"""Columns that are numbers, or true and false, in a function."""
TEXTS = {
    "version": "3.9 3.10 3.11",
    "trailing": "1.1 1.10 1.100",
    "release": "1.2.3 1.10.0 v2",
    "capital": "1E5 2E5 3E5",
    "short": "1e5 1e6 1e7",
    "hash": "7e10 3e45 0123",
    "plus": "+5 +6 5",
    "leading": "007 008 10",
    "octal": "0o17 010 8",
    "hex": "0x10 16 ff",
    "grouped": "1_000 2_000 3",
    "point": ".5 5. 0.5",
    "minus": "-0 0 1",
    "half": "0.10 0.20 0.3",
    "precise": "0.1234567890123456789 9007199254740993.0 1",
    "overflow": "1e999 -1e999 1",
    "digits": f"{'9' * 5000} 1 2",
    "nan": "nan NaN NAN",
    "nan_number": "NaN 1 2",
    "inf": "inf -inf Infinity",
    "none": "null None NA",
    "null_number": "null 1 2",
    "empty_word": "NULL nil N/A",
    "boolean": "true True false",
    "boolean_number": "true 1 false",
    "yes": "yes no on",
    "date": "2026-01-31 2026-02-01 2026-12-24",
    "night": "00:30 08:00 01:05",
    "stamp": "2026-01-31T08:00:00Z 2026-01-31T08:00:00+01:00 x",
    "slash": "01/02/2026 1/2/26 x",
    "arabic": "\u0661 \u0662 \u0663",
    "wide": "\uff11 \uff12 \uff13",
    "power": "x\u00b2 \u00b2 2",
    "accent": "\u00e9 e\u0301 e",
    "emoji": "\U0001f600 \u200b \ufeffx",
    "rtl": "\u202e1 \u05d0 a",
    "single": "' '' a'b",
    "double": '" "" a"b',
    "backquote": "`id` $(id) ${HOME}",
    "backslash": "\\ \\n a\\",
    "dollar": "$ $HOME $$",
    "brace": "{ } {key}",
    "bracket": "[1] [] {}",
    "glob": "* ? [a-z]",
    "tilde": "~ ~root !!",
    "semicolon": "a;b ;; ;",
    "pipe": "| & >x",
    "hash_sign": "#1 #N/A a#b",
    "option": "-n --help -",
    "percent": "10% %s %d",
    "currency": "1\u20ac $1 1$",
    "equals": "=1+1 @x +a",
    "path": "/a/../b ./x ..",
    "colon": "a:b 1:b ::",
    "unit": "1k 2M 3GiB",
    "fractional": "1/2 1j 1L",
}
AWKWARD = {
    "blanks": [" 1", "1 ", "  "],
    "empty": ["", "1", "2"],
    "comma": ["1,2", "a, b", ","],
    "time": ["00:30", "08:00", "23:59"],
    "range": ["0:9", "12:30", "1:2:3"],
    "tab": ["\t", "a\tb", "1\t"],
    "lines": ["a\nb", "a\r\nb", "\n"],
    "semicolons": ["1;2", "3", "4"],
}
"""Columns that no grid can write without --text, and some with it neither."""
COLUMNS = {**{key: text.split(" ") for key, text in (NUMBERS | TEXTS).items()}, **AWKWARD}
ROWS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
GIVEN = [list(row.values()) for row in ROWS]
WORK = """\
import json, sys

def same(**values):
    return values

if __name__ == "__main__":
    print(json.dumps(sys.argv[1:]))
    print(json.dumps({"words": sys.argv[1:]}))
"""


def _separated(path: Path, delimiter: str) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def _parquet(path: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(COLUMNS), path)
    return path


def _gzipped(path: Path) -> Path:
    path.write_bytes(gzip.compress(_separated(path.with_suffix(".x"), ",").read_bytes()))
    return path


def _text(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


FILES: dict[str, Callable[[], Path]] = {
    "csv": lambda: _separated(Path("list.csv"), ","),
    "csv.gz": lambda: _gzipped(Path("list.csv.gz")),
    "tsv": lambda: _separated(Path("list.TSV"), "\t"),
    "json": lambda: _text(Path("list.json"), json.dumps(ROWS)),
    "jsonl": lambda: _text(Path("list"), "".join(f"{json.dumps(row)}\n" for row in ROWS)),
    "parquet": lambda: _parquet(Path("list.parquet")),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_value_of_a_list_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)

    items = [*each_item(FILES[kind]())]

    assert [[_text_of(value) for value in item.values()] for item in items] == GIVEN
    numbers = {key for key, value in items[0].items() if not isinstance(value, str)}
    assert numbers == (set() if kind in ("json", "jsonl", "parquet") else set(NUMBERS))


@pytest.mark.parametrize("kind", ["csv", "json"])  # with numbers, and with texts alone
def test_every_value_of_a_list_is_the_same_in_a_command_a_function_and_the_rows(
    hpctk: Hpctk, kind: str
) -> None:
    (hpctk.cwd / "work.py").write_text(WORK)
    file = str(FILES[kind]())
    words = " ".join(f"{{{key}}}" for key in COLUMNS)

    command = hpctk(
        "map", "--run", "c", "--items", file, "--command", f"python work.py {words}", "-o", "c.json"
    )
    function = hpctk("map", "work:same", "--run", "f", "--items", file, "-o", "f.json")

    assert (command.code, function.code) == (0, 0), command.err + function.err
    assert [row["value"]["words"] for row in json.loads(Path("c.json").read_text())] == GIVEN
    rows = json.loads(Path("f.json").read_text())
    assert [row["value"] for row in rows] == [row["item"] for row in rows]
    assert [row["item"] for row in rows] == [*each_item(Path(file))]


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("key", [key for key in COLUMNS if "," not in "".join(COLUMNS[key])])
def test_a_grid_has_the_same_values_and_types_as_a_column(key: str) -> None:
    # Commas separate the values of a grid.
    values = COLUMNS[key]
    as_text = key in AWKWARD or key == "empty"

    found = [item["x"] for item in grid([f"x={','.join(values)}"], ["x"] if as_text else [])]

    assert list(map(_text_of, found)) == values
    assert all(isinstance(value, str) for value in found) == (key not in NUMBERS)
