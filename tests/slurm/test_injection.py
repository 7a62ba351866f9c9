"""Hostile texts in every place of a script: refused, or run as what they are and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.render import script as render
from hpc_toolkit.slurm.render.spec import OPTIONS, ScriptSpec
from tests.hostile import ODD_BUT_FINE
from tests.slurm import injection
from tests.slurm.injection import DIRECTIVES, PLACES, TEXTS
from tests.slurm.injectionbench import (
    PARTS,
    Bench,
    Part,
    Plan,
    Reader,
    can_be_a_name,
    mixed,
    single,
)
from tests.slurm.rehearsal import MEASURED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.slurm.reallab import LabUnderTest

SLEEP = "hpc_toolkit.science.workloads.synthetic:Sleep"
JOBS = 4
"""So many jobs try all texts of the places of which a job can have many."""
READ = 2
"""So many texts of each place are read by sbatch."""
OF = 5
"""Of so many texts one is tried in each place; 'make soak' tries all."""
AT_ONCE = 100


def taken(of: int = 1) -> dict[str, list[str]]:
    """The texts that each part can try, or one of so many."""
    accepted = {part.place: injection.accepted(part.place, of) for part in PARTS}
    return {part.place: part.texts(one.value for one in accepted[part.place]) for part in PARTS}


def run_all(bench: Bench, plans: Sequence[Plan]) -> None:
    """Run jobs, and hold each against its plan and all against what they left behind."""
    before = bench.files()
    jobs = {bench.submit(plan): plan for plan in plans}
    made: set[Path] = set()
    for job in jobs:
        bench.lab.wait_for(job)
    for job, plan in jobs.items():
        made |= bench.check(job, plan)
    assert bench.files() - before == made
    assert bench.canaries() == set()


def spread(values: Sequence[Any], number: int) -> list[Any]:
    """At most ``number`` of them, from the first to the last."""
    return [values[at * len(values) // number] for at in range(number)] if values else []


# --- refused or accepted ---


@pytest.mark.soak  # test_render_properties.py tries random ones of them in every field and list
def test_every_text_in_every_place_is_refused_clearly_or_makes_a_script(tmp_path: Path) -> None:
    os.chdir(tmp_path)  # where a careless renderer would leave something

    for one in injection.outcomes():
        assert (one.script is None) is (one.error is not None)
        if one.error is not None:
            assert one.error.message.isprintable(), one
            assert one.error.hint, one
    MEASURED.extend(injection.table().splitlines())

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "shape", "but"),
    [
        ("run", "x/{}", ""),
        ("python", "/x/{}", ""),
        ("venv", "/x/{}", ":"),
        ("conda", "/x/envs/{}", ":"),
        ("container", "/x/{}", ""),
        ("program", "/x/{}", ""),
        ("program's word", "{}", ""),
        ("env value", "{}", ""),
        ("site env: A", "{}", ""),
        ("site conda_base", "/x/{}", ":"),
        ("run-dir", "x/{}", ""),
        ("stage", "/x/{}", ""),
        ("stage-dir", "/x/{}", ""),
        # What separates paths there.
        ("bind", "/x/{}", ":,"),
        ("site binds", "/x/{}", ":,"),
        # What Slurm would fill in.
        ("chdir", "/x/{}", "%"),
        ("output", "logs/{}", "%"),
        ("error", "logs/{}", "%"),
        ("comment", "{}", ""),
    ],
)
def test_ordinary_odd_names_are_accepted(place: str, shape: str, but: str) -> None:
    (asked,) = (one for one in PLACES if one.name == place)

    for text in ODD_BUT_FINE:
        if not set(text) & set(but):
            found = injection.outcome(asked, shape.replace("{}", text))
            assert found.script is not None, found


def test_every_field_and_every_key_is_a_place() -> None:
    from hpc_toolkit.slurm.clusters.keys import KEYS
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


def read_all(lab: LabUnderTest, cwd: Path, number: int | None) -> None:
    reader, read = Reader(lab, cwd), 0
    for place in DIRECTIVES:
        found = injection.accepted(place.name, OF if number else 1)
        chosen = found if number is None else spread(found, min(number, len(found)))
        assert reader.differences(place, chosen) == []
        read += len(chosen)
    MEASURED.append(f"injection: {read} scripts read by sbatch")
    assert read > (number or 40) * 5
    assert {path.name for path in cwd.iterdir()} == {"read.sbatch"}


@pytest.mark.slow
def test_sbatch_reads_the_directive_that_was_asked_for_and_no_other(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    read_all(lab, tmp_path, READ)


# --- run ---


@pytest.mark.slow
def test_mixed_texts_are_run_as_they_are(lab: LabUnderTest, tmp_path: Path) -> None:
    bench = Bench(lab, tmp_path)
    plans = mixed(bench, taken(OF), JOBS)

    run_all(bench, plans)

    tried = sum(len(plan.tried) for plan in plans)
    MEASURED.append(f"injection: {len(plans)} jobs tried {tried} texts")
    assert tried > 150


def test_a_setup_that_is_no_command_ends_the_job_and_runs_nothing_else(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    bench = Bench(lab, tmp_path)
    plans = []
    for text in ("EOF", "a b", "'EOF'", "canary", "x/../y"):
        plan = Plan(ends="FAILED", says=f"setup failed: {text.strip(chr(39))}")
        plan.listed("setup", text)
        plans.append(plan)

    run_all(bench, plans)

    assert not list(bench.notes.glob("*.json"))


def test_what_the_script_and_bash_call_their_own_is_refused_or_exported_as_asked(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    """Or a variable of the user's would name another job to the script's scancel."""
    bench = Bench(lab, tmp_path)
    every = subprocess.run(["bash", "-c", "compgen -v"], capture_output=True, check=True, text=True)
    lines = [
        line.strip()
        for template in ("base", "plain", *render.template_names())
        for line in render._source(template + ".sbatch.j2").splitlines()
        if not line.startswith("#") and "log " not in line
    ]
    # A function's own shadow the user's; everything else stands beside them.
    local = set(re.findall(r"\w+", " ".join(line for line in lines if line.startswith("local "))))
    own = {name for line in lines for name in re.findall(r"(?:^|[\s;(])([A-Za-z_]\w*)\+?=", line)}
    own -= local
    assert {"OMP_NUM_THREADS", "VIRTUAL_ENV", "HPCTK_WARNED"} <= own
    plan = Plan()
    # Python, which is the probe, changes LC_CTYPE where it names no locale (PEP 538).
    for name in sorted({*every.stdout.split(), *own} - {"PATH", "LC_CTYPE"}):
        try:
            ScriptSpec(python="/p", env=((name, "7"),))
        except HpcToolkitError:
            continue
        plan.env[name] = "7"

    assert own & plan.env.keys() <= {"OMP_NUM_THREADS", "VIRTUAL_ENV"}
    run_all(bench, [plan])


# --- runs ---

RUNS = (
    'it\'s "$(touch canary)" `touch canary`; touch canary & | > < $HOME {{ 7*7 }}{% raw %}<#--',
    " *?[a-z]{a,b}~!! # \\ %j %% \u540d\u524d caf\u00e9 u\u0308 \u05d0\u05d1 \U0001f600 ",
    "--help",
    ":",
)


class Venv:
    """The interpreter of these tests, in a directory with an odd name."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        home = bench.directory('it\'s a "venv" $(touch canary)')
        (home / "venv").symlink_to(sys.prefix)
        self.python = home / "venv/bin/python"

    def hpctk(self, *words: str) -> str:
        path = f"{self.bench.bin}:{os.environ['PATH']}"
        done = self.bench.lab.run(
            self.python, "-m", "hpc_toolkit", *words, cwd=self.bench.place, env={"PATH": path}
        )
        return done.stdout


_AT_ONCE = 16
"""Jobs between two looks: Slurm forgets a job 5 minutes after its end."""


def work_on(bench: Bench, names: Sequence[str]) -> None:
    """Make, render, submit and work off a run of each name, by option and by argument."""
    venv = Venv(bench)
    for first in range(0, len(names), _AT_ONCE):
        submitted = {
            submit_run(bench, venv, at, names[at])
            for at in range(first, min(first + _AT_ONCE, len(names)))
        }
        for job, root in submitted:
            record = bench.lab.wait_for(job)
            assert record.state == "COMPLETED", f"{root}:\n{bench.lab.output(record)}"
            status = Run.open(root).status()
            assert (status.complete, status.stages["items"].done) == (True, 1), root
    made = {path.name for path in bench.place.iterdir()}
    assert made == {*names, "slurm"}
    assert len(list((bench.place / "slurm/logs").iterdir())) == len(names)
    assert bench.canaries() == set()


def submit_run(bench: Bench, venv: Venv, at: int, name: str) -> tuple[str, Path]:
    """Make a run called ``name`` and submit a job for it; return the job and the run."""
    root = bench.place / name
    Run.create(root, [{"seconds": 0.0, "name": name}], workload=SLEEP)
    # A relative path, an absolute one, or the script's argument.
    option = [f"--run=./{name}", f"--run={root}", ""][at % 3]
    words = ["--mem=200M", "--time=5", f"--job-name=run-{at}", "--max-restarts=0"]
    script = venv.hpctk("render", "--cluster=lab", *words, *filter(None, [option])).strip()
    assert script == f"slurm/run-{at}.sbatch"
    own = {"PATH": f"{bench.bin}:{os.environ['PATH']}"}
    # sbatch reads ":" as the beginning of another job.
    argument = [] if option else ["./:" if name == ":" else name]
    return bench.lab.sbatch(script, *argument, cwd=bench.place, env=own), root


@pytest.mark.slow
def test_runs_with_odd_names_are_worked_on(lab: LabUnderTest, tmp_path: Path) -> None:
    work_on(Bench(lab, tmp_path), RUNS)


# --- at full size ---


@pytest.mark.soak
def test_every_directive_is_read_as_it_was_asked_for(lab: LabUnderTest, tmp_path: Path) -> None:
    read_all(lab, tmp_path, None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.place)
def test_every_text_is_run_in_a_job_of_its_own(
    part: Part, lab: LabUnderTest, tmp_path: Path
) -> None:
    bench = Bench(lab, tmp_path)
    plans = [single(bench, part, text) for text in taken()[part.place]]

    for first in range(0, len(plans), AT_ONCE):
        run_all(bench, plans[first : first + AT_ONCE])

    MEASURED.append(f"injection, {part.place}: {len(plans)} jobs")
    assert plans


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_name_is_worked_on_as_a_run(lab: LabUnderTest, tmp_path: Path) -> None:
    names = [text for text in TEXTS if text.isprintable() and can_be_a_name(text)]

    work_on(Bench(lab, tmp_path), [name for name in names if name != "slurm"])

    MEASURED.append(f"injection: {len(names)} hostile names worked on as runs")
