"""Scripts as the documentation of libraries has them: the lines that change, and equal results."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit import study
from hpc_toolkit.run import Run
from tests.documents import REPOSITORY, read_blocks
from tests.integration.realrun import Hpctk

GUIDE = {one.file: one.text for one in read_blocks(REPOSITORY / "docs/how-to/scripts.md")}
"""The scripts after the change."""
NOTEBOOK = """
import os, nbformat
from pathlib import Path
from tests.notebooks import execute

texts = Path("cells.py").read_text().split("# %%")
cells = [nbformat.v4.new_code_cell(text, id=f"c{at}") for at, text in enumerate(texts)]
nbformat.write(nbformat.v4.new_notebook(cells=cells), "cells.ipynb")
print(execute(Path("cells.ipynb"), Path.cwd(), dict(os.environ)).text("c2"))
"""
DATA = {f"data/{n}.csv": f"day,price\n1,{n}.5\n2,{'x' if n == 3 else n}\n" for n in range(6)}


def original(text: str) -> str:
    """A script before the change, by the comments that mark it."""
    text = re.sub(r"^.*  # new\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^( *)\S.*  # was: (.*)$", r"\1\2", text, flags=re.MULTILINE)


def lines_changed(before: str, after: str) -> int:
    found = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    codes = [one for one in found.get_opcodes() if one[0] != "equal"]
    return sum(max(i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in codes)


def printed(_where: Path, out: str) -> Any:
    """What the script printed, in any order."""
    return sorted(line for line in out.splitlines() if not line.startswith("note: "))


def logged(where: Path, _out: str) -> Any:
    """What each job of a sweep logged, and the weights of its model."""
    import torch

    found = {}
    for path in where.glob("multirun/*/*/[0-9]*/train.log"):
        weights = torch.load(path.parent / "model.pt")
        texts = [re.sub(r"^\[[^]]*\]", "", line) for line in path.read_text().splitlines()]
        found[path.parent.name] = texts, [one.tolist() for one in weights.values()]
    return found


def trials(where: Path, _out: str) -> Any:
    """How many trials there are; the value of each is that of the objective with its parameters."""
    optuna = pytest.importorskip("optuna")
    code: dict[str, Any] = {"__name__": "tune"}
    exec(GUIDE["tune.py"], code)
    storage = f"sqlite:///{where}/study.db"
    found = study.load(where / "runs/iris") if (where / "runs").exists() else None
    found = found or optuna.load_study(study_name="iris", storage=storage)
    complete = [one for one in found.trials if one.state.name == "COMPLETE"]
    assert complete
    for one in complete:
        assert one.value == code["objective"](optuna.trial.FixedTrial(one.params))
    assert all(one.state.is_finished() for one in found.trials)
    return len(found.trials)


@dataclass(frozen=True)
class Published:
    """Files of the guide, how they are run, how many lines change, and the results."""

    files: list[str]
    words: list[str]
    lines: int
    results: Callable[[Path, str], Any] = printed
    root: str = "runs/*"
    instead: str = ""
    """The other command."""

    def run(self, hpctk: Hpctk, where: Path, words: list[str], files: dict[str, str]) -> Any:
        for name, text in {**files, **DATA, "notebook.py": NOTEBOOK}.items():
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            (where / name).write_text(text)
        ended = hpctk.python(*words, cwd=where)
        assert ended.code == 0, ended.err
        return self.results(where, ended.out)


PUBLISHED = {
    "grid search": Published(["grid.py"], ["grid.py"], 2),
    "sweep": Published(
        ["train.py", "config.yaml"],
        ["train.py", "-m", "lr=0.1,0.01", "model.hidden=8"],
        1,
        logged,
        "multirun/*/*/.hpctk",
    ),
    "study": Published(
        ["tune.py"],
        ["tune.py"],
        0,
        trials,
        instead="study tune.py:objective --trials 12 --pruner median --workers 2 --run runs/iris",
    ),
    "notebook": Published(["cells.py"], ["notebook.py"], 2),
    "files": Published(["files.py"], ["files.py"], 2),
}


# Each process of these three imports torch or scikit-learn; test_hydra.py, test_study.py and
# test_joblib.py have the same ways in.
HEAVY = {"grid search", "sweep", "study"}


def slow(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.soak if name in HEAVY else pytest.mark.slow)


@pytest.mark.parametrize("name", PUBLISHED)
def test_two_lines_of_a_published_script_change(name: str) -> None:
    one = PUBLISHED[name]
    before = {file: original(GUIDE[file]) for file in one.files}

    assert sum(lines_changed(text, GUIDE[file]) for file, text in before.items()) == one.lines <= 2
    assert not any("hpctk" in text or "hpc_toolkit" in text for text in before.values())


@pytest.mark.parametrize("name", [slow(name) for name in PUBLISHED])
def test_a_published_script_has_the_same_results_by_hpctk(hpctk: Hpctk, name: str) -> None:
    one = PUBLISHED[name]
    after = {file: GUIDE[file] for file in one.files}
    before = {file: original(text) for file, text in after.items()}
    words = ["-m", "hpc_toolkit", *one.instead.split()] if one.instead else one.words

    expected = one.run(hpctk, hpctk.cwd / "before", one.words, before)
    found = one.run(hpctk, hpctk.cwd / "after", words, after)

    assert found == expected
    assert expected
    (path,) = (hpctk.cwd / "after").glob(f"{one.root}/run.json")
    assert Run.open(path.parent).status().stages["items"].done >= 2
