"""Recorded scores from a file: one row for each arm, one column for each evaluation task.

Columns:

* ``size``, ``revision`` and ``layer`` name an arm. ``size`` is a number of parameters, such as
  ``410m`` or ``1.4b``, or a word without digits, such as ``base``, if it is unknown. ``revision``
  is ``step512``, or ``main``, which counts as step 143000, Pythia's last. The largest layer of a
  model is its last. ``family`` distinguishes models of equal size. A column ``step`` replaces the
  step that ``revision`` names; an empty cell means unknown.
* ``s_<task>`` is the score on a task, higher is better; at least one column, and no gaps.
* ``t_<task>`` is the duration of that evaluation in seconds, ``e_<task>`` the score's standard
  error: each for all tasks or for none.
* ``m_<metric>`` is another metric of an arm; empty or ``nan`` if it is unknown.

Other columns are ignored.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from replay import ScoreTable

from hpc_toolkit.bandit.arms import GEOMETRY_NAMES, Arm, ArmTable, geometry_features
from hpc_toolkit.bandit.policy import LARGEST_NUMBER, Floats, TaskSet
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.science.workloads.pythia import LAST_STEP

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([kmb]?)", re.IGNORECASE)
_STEP = re.compile(r"step([0-9]{1,15})")
_FACTOR = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_KEYS = ("size", "revision", "layer")


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of a file, and their names in messages."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[str]
    """Name of each row in messages."""

    def fault(self, row: int, name: str, problem: str, hint: str) -> ConfigError:
        """The error to raise for one cell."""
        cell = self.columns[name][row]
        where = f"{self.path}, {self.lines[row]}, column {name!r}"
        return ConfigError(f"{where}: {cell!r} {problem}", hint=hint)

    def text(self, row: int, name: str) -> str:
        """A cell as text; "" if it is empty or the column is missing."""
        return self.columns[name][row].strip() if name in self.columns else ""

    def number(
        self, row: int, name: str, *, low: float = -LARGEST_NUMBER, gaps: bool = False
    ) -> float:
        """A cell as a number of at least ``low``; NaN if it is empty and ``gaps`` is set."""
        text = self.text(row, name)
        try:
            number = float(text) if text else math.nan
        except ValueError:
            raise self.fault(row, name, "is not a number", "write a plain number") from None
        if math.isnan(number) and gaps:
            return math.nan
        if not low <= number <= LARGEST_NUMBER:
            if math.isnan(number):
                hint = "give it, or leave out the arm's row or such columns of all tasks"
                raise self.fault(row, name, "is missing", hint)
            hint = f"give a number of {low:g} to {LARGEST_NUMBER:g}"
            raise self.fault(row, name, "is out of range", hint)
        return number

    def matrix(self, prefix: str, tasks: list[str], *, low: float) -> Floats | None:
        """The columns of all tasks with this prefix, shape (n_arms, n_tasks); None without any."""
        present = [task for task in tasks if f"{prefix}{task}" in self.columns]
        if not present:
            return None
        if len(present) < len(tasks):
            missing = next(task for task in tasks if task not in present)
            message = f"{self.path}: no column '{prefix}{missing}'"
            raise ConfigError(message, hint=f"give '{prefix}<task>' for every task, or for none")
        rows = range(len(self.lines))
        cells = [[self.number(row, f"{prefix}{task}", low=low) for task in tasks] for row in rows]
        return np.array(cells, dtype=np.float64)


def read_score_table(path: Path) -> ScoreTable:
    """Read a ``.csv`` or ``.csv.gz`` file; the arms keep the file's order.

    A ConfigError names the line and column.
    """
    if not path.name.endswith((".csv", ".csv.gz")):
        message = f"{path}: not a table of scores"
        raise ConfigError(message, hint="its name ends with .csv or .csv.gz")
    cells = _csv_cells(path)
    missing = [name for name in _KEYS if name not in cells.columns]
    tasks = [name[2:] for name in cells.columns if name.startswith("s_") and name != "s_"]
    if missing or not tasks or not cells.lines:
        what = f"no column {missing[0]!r}" if missing else "no row"
        message = f"{path}: {what if missing or tasks else 'no column with the scores of a task'}"
        raise ConfigError(message, hint="columns are size, revision, layer and s_<task>, ...")
    scores = cells.matrix("s_", tasks, low=-LARGEST_NUMBER)
    assert scores is not None
    rows = range(len(cells.lines))
    return ScoreTable(
        arms=_arms(cells),
        tasks=TaskSet(tuple(tasks)),
        scores=scores,
        seconds=cells.matrix("t_", tasks, low=0.0),
        stderrs=cells.matrix("e_", tasks, low=0.0),
        metrics={
            name[2:]: np.array([cells.number(row, name, gaps=True) for row in rows])
            for name in cells.columns
            if name.startswith("m_") and name != "m_"
        },
    )


def _csv_cells(path: Path) -> _Cells:
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except FileNotFoundError as error:
        message = f"{path}: no such file"
        raise ConfigError(message, hint="--table names a table of scores") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        message = f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(message, hint="the file may be cut off") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        rows = {f"line {reader.line_num}": cells for cells in reader if cells}
    except csv.Error as error:
        message = f"{path}, line {reader.line_num}: {error}"
        raise ConfigError(message, hint="use CSV with commas and one header line") from error
    if twice := [name for name in header if header.count(name) > 1]:
        message = f"{path}, line 1: column {twice[0]!r} occurs {header.count(twice[0])} times"
        raise ConfigError(message, hint="give every column its own name")
    for line, cells in rows.items():
        if len(cells) != len(header):
            message = f"{path}, {line}: {len(cells)} cells, the header has {len(header)}"
            raise ConfigError(message, hint="the file may be cut off")
    columns = {name: [cells[place] for cells in rows.values()] for place, name in enumerate(header)}
    return _Cells(path, columns, list(rows))


def _arms(cells: _Cells) -> ArmTable:
    rows = range(len(cells.lines))
    layers = [int(cells.number(row, "layer", low=0.0)) for row in rows]
    models = [(cells.text(row, "family"), cells.text(row, "size")) for row in rows]
    blocks: dict[tuple[str, str], int] = {}
    for model, layer in zip(models, layers, strict=True):
        blocks[model] = max(blocks.get(model, 1), layer)
    arms: list[Arm] = []
    seen: dict[str, str] = {}
    for row, (model, layer) in enumerate(zip(models, layers, strict=True)):
        if layer != cells.number(row, "layer"):
            raise cells.fault(row, "layer", "is not a whole number", "layers count from 0")
        group = "/".join(filter(None, (*model, cells.text(row, "revision"))))
        name = f"{group}/layer{layer}"
        if name in seen:
            hint = "give every arm one row"
            raise cells.fault(row, "layer", f"repeats arm {name!r} of {seen[name]}", hint)
        seen[name] = cells.lines[row]
        size, step = _size(cells, row), _step(cells, row)
        known = geometry_features(
            size=size or 1.0, step=step or 0, layer=layer, layers=blocks[model]
        )
        log_size = math.nan if size is None else known[0]
        arms.append(Arm(name, group, (log_size, math.nan if step is None else known[1], known[2])))
    return ArmTable(tuple(arms), GEOMETRY_NAMES)


def _size(cells: _Cells, row: int) -> float | None:
    """The number of parameters of a row's model; None if its size is a word."""
    text = cells.text(row, "size")
    if text and not re.search("[0-9]", text):
        return None
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _FACTOR[match[2].lower()] if match else 0.0
    if not size:
        hint = "write the number of parameters, such as 410m or 1.4b, or a word without digits"
        raise cells.fault(row, "size", "is not a model's size", hint)
    return size


def _step(cells: _Cells, row: int) -> int | None:
    """The training step of a row; None if its ``step`` cell is empty."""
    if "step" in cells.columns:
        number = cells.number(row, "step", low=0.0, gaps=True)
        return None if math.isnan(number) else int(number)
    revision = cells.text(row, "revision")
    if revision == "main":
        return LAST_STEP
    match = _STEP.fullmatch(revision)
    if not match:
        hint = "revisions are 'step<n>' or 'main'; a column 'step' tells the step of others"
        raise cells.fault(row, "revision", "names no training step", hint)
    return int(match[1])
