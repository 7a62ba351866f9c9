"""Hostile texts in every place of a script: refused, or run as what they are and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from hpc_toolkit.slurm.render.spec import OPTIONS, ScriptSpec
from tests.slurm import injection
from tests.slurm.injection import DIRECTIVES, ODD_PLACE, PLACES, TEXTS, Reader, can_be_a_name
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import MEASURED

SLEEP = "hpc_toolkit.science.workloads.synthetic:Sleep"
READ = 2
"""So many texts of each place are read by sbatch."""
OF = 5
"""Of so many texts one is tried in each place; 'make soak' tries all."""


def spread(values: Sequence[Any], number: int) -> list[Any]:
    """At most ``number`` of them, from the first to the last."""
    return [values[at * len(values) // number] for at in range(number)] if values else []


# --- refused or accepted ---


def test_every_field_and_every_key_is_a_place() -> None:
    from hpc_toolkit.slurm.clusters.facts import KEYS
    from hpc_toolkit.slurm.render.spec import DEFAULT_OPTIONS

    fields = {
        name
        for name, field in ScriptSpec.__dataclass_fields__.items()
        if (OPTIONS[name].value.quantity or "int" not in str(field.type))
        and "bool" not in str(field.type).split(" |")[0]
    }
    words = {place.name.replace("-", "_") for place in PLACES}
    same = {"modules": "module", "command": "program", "env": "env value"}
    keys = {place.name.removeprefix("site ") for place in PLACES if place.name.startswith("site ")}

    assert {name for name in fields if same.get(name, name) not in words} == set()
    assert keys >= {
        "modules",
        "setup",
        "node_setup",
        "env: A",
        "nccl: NCCL_A",
        "conda_base",
        "binds",
    }
    assert KEYS.keys() >= {"modules", "setup", "node_setup", "env", "nccl", "conda_base", "binds"}
    assert {f"defaults: {name}" for name in DEFAULT_OPTIONS} - keys <= {
        "defaults: cpus_per_task",
        "defaults: mem_per_cpu",
        "defaults: mem_per_gpu",
    }


# --- read by sbatch ---


@pytest.mark.slow
@pytest.mark.parametrize("number", [READ, pytest.param(None, marks=pytest.mark.soak)])
def test_sbatch_reads_the_directive_that_was_asked_for_and_no_other(
    lab: LabUnderTest, tmp_path: Path, number: int | None
) -> None:
    reader, read = Reader(lab, tmp_path), 0
    for place in DIRECTIVES:
        found = injection.accepted(place.name, OF if number else 1)
        chosen = found if number is None else spread(found, min(number, len(found)))
        assert reader.differences(place, chosen) == []
        read += len(chosen)
    MEASURED.append(f"injection: {read} scripts read by sbatch")
    assert read > (number or 40) * 5
    assert {path.name for path in tmp_path.iterdir()} == {"read.sbatch"}


# --- runs ---

RUNS = (
    'it\'s "$(touch canary)" `touch canary`; touch canary & | > < $HOME {{ 7*7 }}{% raw %}<#--',
    " *?[a-z]{a,b}~!! # \\ %j %% \u540d\u524d caf\u00e9 u\u0308 \u05d0\u05d1 \U0001f600 ",
    "--help",
    ":",
)


_AT_ONCE = 16
"""Jobs between two looks: Slurm forgets a job 5 minutes after its end."""


EVERY = [text for text in TEXTS if text.isprintable() and can_be_a_name(text) and text != "slurm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(RUNS, id="some"),
        pytest.param(EVERY, id="every", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_runs_with_odd_names_are_worked_on(
    lab: LabUnderTest, tmp_path: Path, names: Sequence[str]
) -> None:
    """Each is made, rendered, submitted and worked off, by option and by argument."""
    # The interpreter of these tests, in a directory with an odd name.
    venv = tmp_path / 'it\'s a "venv" $(touch canary)'
    venv.symlink_to(sys.prefix)
    place = tmp_path / ODD_PLACE
    place.mkdir()
    for first in range(0, len(names), _AT_ONCE):
        submitted = {
            submit_run(lab, venv / "bin/python", at, place / names[at])
            for at in range(first, min(first + _AT_ONCE, len(names)))
        }
        for job, run in submitted:
            record = lab.wait_for(job)
            assert record.state == "COMPLETED", f"{run}:\n{lab.output(record)}"
            status = Run.open(run).status()
            assert (status.complete, status.stages["items"].done) == (True, 1), run
    assert {path.name for path in place.iterdir()} == {*names, "slurm"}
    assert len(list((place / "slurm/logs").iterdir())) == len(names)
    assert not [*tmp_path.rglob("canary"), *lab.directory.rglob("canary")]
    MEASURED.append(f"injection: {len(names)} hostile names worked on as runs")


def submit_run(lab: LabUnderTest, python: Path, at: int, root: Path) -> tuple[str, Path]:
    """Make a run and submit a job for it; return the job and the run."""
    Run.create(root, [{"seconds": 0.0, "name": root.name}], workload=SLEEP)
    # A relative path, an absolute one, or the script's argument.
    option = [f"--run=./{root.name}", f"--run={root}", ""][at % 3]
    words = ["--mem=200M", "--time=5", f"--job-name=run-{at}", "--max-restarts=0"]
    words += [option] if option else []
    hpctk = (python, "-m", "hpc_toolkit", "render", "--cluster=lab")
    script = lab.run(*hpctk, *words, cwd=root.parent).stdout.strip()
    assert script == f"slurm/run-{at}.sbatch"
    # sbatch reads ":" as the beginning of another job.
    argument = [] if option else ["./:" if root.name == ":" else root.name]
    return lab.sbatch(script, *argument, cwd=root.parent), root
