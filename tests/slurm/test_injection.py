"""Hostile texts as directives, names of runs, labs and jobs, and on the terminal of a real Slurm.

Each is refused, or passed on as it is and nothing else. tests/unit/test_render_properties.py and
tests/integration/test_rendered_script.py have such texts in the other places of a script.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.cli import load_commands
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab.settings import LabPaths, LabSettings, check_name
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import OPTIONS, ScriptSpec, read_spec
from hpc_toolkit.slurm.render.values import file_name
from hpc_toolkit.system.terminal import show_error
from hpc_toolkit.workerjobs import request, submit
from tests.hostile import HOSTILE, ODD_BUT_FINE
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import MEASURED
from tests.slurm.templatesite import SLEEP

LAB = load_cluster("lab")
ODD_PLACE = 'it\'s "the" $(touch canary) `place`; # \u540d\u524d'
"""Where jobs are submitted."""
# What runs, wherever it is read as anything but text; "canary" is looked for afterwards.
TEXTS = tuple(dict.fromkeys((*HOSTILE, *ODD_BUT_FINE)))


# --- directives ---


@dataclass(frozen=True)
class Place:
    """An option of a script whose text goes to sbatch."""

    name: str
    """As sbatch has it, and as ScriptSpec has it with underscores."""
    shapes: tuple[str, ...]
    """What is around each hostile text, so that a check of the beginning alone lets it through."""
    needs: dict[str, Any] = field(default_factory=dict)

    def script(self, value: str | None) -> str:
        """The script with this text; None: without the option. Raises HpcToolkitError."""
        fields: dict[str, Any] = {"python": "/opt/python", **self.needs}
        if value is not None and self.name == "comment":
            fields["sbatch"] = (f"comment={value}",)
        elif value is not None:
            fields[self.name.replace("-", "_")] = value
        spec = read_spec(fields)
        return render_script(spec, LAB, "work-queue" if spec.array is None else "array")

    def accepted(self, first: int, of: int) -> list[tuple[str, str]]:
        """Texts that are not refused, with their scripts; one of ``of`` is tried."""
        found = []
        for value in [one.replace("{}", text) for one in self.shapes for text in TEXTS][first::of]:
            try:
                found.append((value, self.script(value)))
            except HpcToolkitError:
                continue
        return found


def option(name: str, *good: str, **needs: Any) -> Place:
    return Place(name, ("{}", *(f"{one}{{}}" for one in good)), needs)


GPU = {"gpus_per_node": 1}
DIRECTIVES = (
    *(option("job-name", "a"), option("account", "a"), option("partition", "a,"), option("qos")),
    *(option("reservation", "a"), option("constraint", "a&")),
    *(option("nodelist", "n1,"), option("exclude", "n")),
    *(option("gpu-type", "l", **GPU), option("gpu-bind", "map_gpu:0,", **GPU)),
    *(option("gres", "nvme:"), option("mem", "1"), option("exclusive", "user")),
    *(option("mem-per-cpu", "1"), option("mem-per-gpu", "1", **GPU)),
    *(option("time", "1-"), option("time-min", "1:"), option("signal")),
    *(option("array", "0-", "0%"), option("dependency", "afterok:1")),
    *(option("output", "logs/", "%x."), option("error", "logs/")),
    *(option("open-mode", "append"), option("chdir", "/x/")),
    option("comment", "a "),
)


READ = 2
"""So many texts of each place are read by sbatch."""
OF = 5
"""Of so many texts one is tried in each place; 'make soak' tries all."""


def spread(values: Sequence[Any], number: int) -> list[Any]:
    """At most ``number`` of them, from the first to the last."""
    number = min(number, len(values))
    return [values[at * len(values) // number] for at in range(number)]


def sbatch_options(told: str) -> dict[str, str]:
    """What ``sbatch --verbose`` says that it read; nothing if it refused the options at once."""
    block = told.partition("sbatch: defined options\n")[2].partition("sbatch: end of defined")[0]
    return dict(re.findall(r"^sbatch: ([a-z][a-z-]*) *: (.*)$", block, re.MULTILINE))


def can_be_a_name(text: str) -> bool:
    """Whether a file can be called so."""
    return text not in ("", ".", "..") and "/" not in text and len(os.fsencode(text)) <= 255


def options_read(lab: LabUnderTest, cwd: Path, script: str) -> dict[str, str]:
    """What sbatch reads in a script; its error where it gave up before."""
    path = cwd / "read.sbatch"
    path.write_text(script, encoding="utf-8")
    told = subprocess.run(
        ["sbatch", "--verbose", "--test-only", str(path)],
        cwd=cwd, env=lab.env, capture_output=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    text = told.stderr.decode()
    return sbatch_options(text) or {"gave up": text}


def differences(
    place: Place, plain: dict[str, str], value: str, read: dict[str, str], cwd: Path
) -> str:
    """What sbatch reads other than it was asked for; "" if nothing."""
    if place.name == "nodelist" and "sbatch: error: " in read.get("gave up", ""):
        return ""  # No list of nodes, or one of more than were asked for.
    # "gres/" since 23.11.
    gres = {",".join(f"gres{sign}{name}" for name in value.split(",")) for sign in ":/"}
    wanted = {value, f"{cwd}/{value}", *gres} | ({"a"} if place.name == "open-mode" else set())
    odd = {name for name in read.keys() | plain.keys() if read.get(name) != plain.get(name)}
    odd -= {place.name, *ALONG.get(place.name, ())}
    # A name that cannot be a file's is changed for the log; see file_name().
    made = place.name == "job-name" and file_name(value) in read["output"]
    odd -= {"output"} if made else set()
    if odd or read.get(place.name, "") not in wanted:
        return f"{place.name} {value!r}: {read.get(place.name)!r}, {odd}"
    return ""


ALONG = {
    **{f"mem-per-{of}": ("mem",) for of in ("cpu", "gpu")},
    "dependency": ("kill-on-invalid-dep",),
    "chdir": ("output",),
}
"""Options that change with another one."""


def test_every_directive_that_takes_a_text_is_tried() -> None:
    texts = {
        name
        for name, field in ScriptSpec.__dataclass_fields__.items()
        if OPTIONS[name].directive
        and (OPTIONS[name].value.quantity or "int" not in str(field.type))
        and "bool" not in str(field.type).split(" |")[0]
    }

    assert {name.replace("_", "-") for name in texts} <= {place.name for place in DIRECTIVES}


@pytest.mark.slow
@pytest.mark.parametrize("number", [READ, pytest.param(None, marks=pytest.mark.soak)])
def test_sbatch_reads_the_directive_that_was_asked_for_and_no_other(
    lab: LabUnderTest, tmp_path: Path, number: int | None
) -> None:
    scripts = 0
    for at, place in enumerate(DIRECTIVES):
        found = place.accepted(at % OF, OF) if number else place.accepted(0, 1)
        plain = options_read(lab, tmp_path, place.script(None))
        for value, script in spread(found, number) if number else found:
            read = options_read(lab, tmp_path, script)
            assert differences(place, plain, value, read, tmp_path) == ""
            scripts += 1
    MEASURED.append(f"injection: {scripts} scripts read by sbatch")
    assert scripts > (number or 40) * 5
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


# --- the command line ---

CLEAR = "\x1b[2J\x1b]0;evil\x07\x9b2J\u202e\r"
"""Clears a terminal, names its window, and turns what follows around."""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    def assert_tame(self) -> None:
        """Nothing of it does more to a terminal than to be read."""
        for line in (self.out + self.err).split("\n"):
            assert line.isprintable(), repr(line)


Call = Any


_command_line: Callable[[str], Any] = cache(load_commands)
"""Each call without the cache would add its commands to the others once more."""


@pytest.fixture
def call(
    lab: LabUnderTest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Ended]:
    """The command line in this process, in an empty directory, beside the lab."""
    for name in set(os.environ) - set(lab.env):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(lab.slurm_conf))
    monkeypatch.chdir(tmp_path)

    def hpctk(*words: str) -> Ended:
        code: object = 0
        try:
            _command_line(words[0])(list(words))
        except SystemExit as end:
            code = end.code
        except HpcToolkitError as error:
            show_error(error)
            code = error.exit_code
        told = capsys.readouterr()
        return Ended(code if isinstance(code, int) else 0, told.out, told.err)

    return hpctk


def sleeping(path: str | Path) -> Run:
    return Run.create(path, [{"seconds": 0.0}], workload=SLEEP)


def queue(lab: LabUnderTest) -> list[str]:
    return lab.run("squeue", "--noheader", "--format=%i %T").stdout.splitlines()


# --- commands ---

sized = pytest.mark.parametrize(
    "every", [pytest.param(24, id="small"), pytest.param(1, id="full", marks=pytest.mark.soak)]
)
SMALL = ("--cluster=lab", "--mem=1G", "--time=5", "--cpus-per-task=1")


@pytest.mark.slow
@sized
def test_a_dry_run_of_a_hostile_run_shows_or_refuses_it_and_does_nothing(
    call: Call, lab: LabUnderTest, tmp_path: Path, every: int
) -> None:
    before, shown, refused = queue(lab), 0, 0
    names = [text for text in TEXTS if "\0" not in text and "\ud800" not in text]
    for text in list(filter(can_be_a_name, names))[::every]:
        run = sleeping(tmp_path / text)

        ended = call("submit", *SMALL, f"--run=./{text}", "--dry-run")

        ended.assert_tame()
        if text.isprintable():
            assert (ended.code, ended.out[:11]) == (0, "#!/bin/bash"), ended
            assert "would run: sbatch --parsable " in ended.err
            shown += 1
        else:
            assert (ended.code, ended.out) == (1, ""), ended
            refused += 1
        assert not run.paths.jobs.exists()
        run.root.rename(tmp_path / "run")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        (tmp_path / "run").rename(tmp_path.parent / f"{tmp_path.name}-{shown + refused}")
    MEASURED.append(f"hostile commands: {shown} shown, {refused} refused")
    assert shown >= 90 // every
    assert refused > 10 // every
    assert queue(lab) == before


def test_a_directory_of_several_lines_is_worked_in_as_any_other(
    call: Call, lab: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cwd = tmp_path / f"a\ntouch canary\n#SBATCH --hold{CLEAR}"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    run = sleeping("r")

    job = call("submit", *SMALL, "--run=r").out.strip()

    assert lab.wait_for(job).state == "COMPLETED"
    assert run.status().complete
    assert {path.name for path in cwd.iterdir()} == {"r", "slurm"}
    assert [path.name for path in cwd.glob("slurm/logs/*")] == [f"work-queue-{job}.out"]
    listed = call("logs", "r", f"--job={job}")
    assert f"work-queue[{job}.0] items left: 0 (complete)" in listed.out
    Ended(0, "", listed.err).assert_tame()
    assert not list(tmp_path.rglob("canary"))


def test_hostile_ids_of_jobs_are_refused_and_cancel_nothing(
    call: Call, lab: LabUnderTest, tmp_path: Path
) -> None:
    sleeping("r")
    job = call("submit", *SMALL, "--run=r", "--sbatch=hold").out.strip()
    other = lab.sbatch("--hold", "--output=/dev/null", "--wrap=true", cwd=tmp_path)
    hostile = (*HOSTILE, *ODD_BUT_FINE, f"{job},{other}", f"{job} {other}", f"{job}_../x", other)
    files = set(tmp_path.rglob("*"))

    for text in hostile:
        for words in (("cancel", "r", "--yes"), ("logs", "r")):
            ended = call(*words, f"--job={text}")
            assert (ended.code, ended.out) == (1, ""), (words, text, ended)
            assert ended.err.startswith("error: ")
            ended.assert_tame()

    assert {line.split()[0] for line in queue(lab)} == {job, other}
    assert set(tmp_path.rglob("*")) == files
    MEASURED.append(f"hostile ids of jobs: {len(hostile)} refused twice")


def test_a_job_with_a_hostile_name_is_shown_in_one_line(
    call: Call, lab: LabUnderTest, tmp_path: Path
) -> None:
    sleeping("r")
    names = ("a|b c", "x JobState=COMPLETED", "$(touch canary)", f"a{CLEAR}b", "a\n999 b")
    for number, name in enumerate(names):
        script = tmp_path / f"own{number}.sbatch"
        script.write_text("#!/bin/bash\n#SBATCH --hold --mem=10M --output=/dev/null\ntrue\n")
        job = call("submit", f"./{script.name}", "--run=r").out.strip()
        lab.scontrol("update", f"jobid={job}", f"jobname={name}")

        state = call("status", "r")
        state.assert_tame()
        # A job that has another name now may be another job.
        which = f"jobs {number + 1}" if number else f"job {job}"
        told = " ".join(state.out.split())
        assert f"{which} unknown (another job has this id, or it was renamed)" in told
    ended = call("cancel", "r", "--yes")
    ended.assert_tame()
    assert not list(tmp_path.glob("canary"))


# --- the terminal ---


@pytest.fixture
def failed(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run whose items, errors, values and name hold what a terminal obeys."""
    text = repr(CLEAR)
    (tmp_path / "wild.py").write_text(
        "from hpc_toolkit.errors import PermanentError\n"
        "def work(item):\n"
        "    if item['n'] == 0:\n"
        f"        return {{'v': {text}}}\n"
        f"    raise PermanentError('bad ' + {text} + '\\nsecond ' + {text})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = f"run{CLEAR}"
    items = [{"n": n, "name": CLEAR, CLEAR: n} for n in range(2)]
    run = Run.create(name, items, workload="wild:work", group_by="name")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_toolkit", "work", name, "--workers=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.status().complete, done.stderr
    Ended(0, done.stdout, done.stderr).assert_tame()
    return name


def test_nothing_that_a_terminal_obeys_reaches_it(call: Call, failed: str) -> None:
    calls = (
        ("status", "RUN"),
        ("status", "RUN", "--json"),
        ("status", "nothing{}"),
        ("explain", "RUN", "--item=0"),
        ("explain", "RUN", "--item=1"),
        ("explain", "RUN", "--item=1", "--json"),
        ("explain", "RUN", "--item=x{}"),
        ("logs", "RUN"),
        ("logs", "RUN", "--item=1"),
        ("logs", "RUN", "--worker=x{}"),
        ("logs", "RUN", "--job=x{}"),
        ("logs", "nothing{}"),
        ("gather", "RUN"),
        ("gather", "RUN", "-o", "{}.nope"),
        ("gather", "RUN", "-o", "{}/x.csv"),
        ("cancel", "RUN", "--job=x{}"),
        ("cancel", "nothing{}"),
        ("submit", "nothing{}/x.sbatch"),
        ("submit", "--run=nothing{}"),
        ("submit", "--run=RUN", "--dry-run"),
        ("retry", "RUN", "--match=x{}"),
        ("render", "x{}"),
        ("render", "--from=x{}"),
        ("render", "--nodes=x{}"),
        ("render", "--evil{}"),
        ("cluster", "show", "x{}"),
        ("lab", "up", "--name=x{}"),
        ("lab", "up", "--dir=x{}"),
        ("status", "RUN", "too many{}"),
    )
    for words in calls:
        texts = [failed if word == "RUN" else word.replace("{}", CLEAR) for word in words]
        ended = call(*(word.replace("=RUN", f"={failed}") for word in texts))

        assert ended.code in (0, 1, 2), words
        if ended.code == 2:
            # The words of the command line library; what it leaves changes the direction at most.
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", ended.err), words
        else:
            ended.assert_tame()


# --- labs ---


def test_hostile_names_and_directories_of_labs_are_refused_or_taken(
    lab_directory: Path,
) -> None:
    taken = {"name": 0, "directory": 0}
    for text in (*HOSTILE, *ODD_BUT_FINE):
        checks: dict[str, Callable[[], object]] = {
            "name": partial(check_name, text),
            "directory": partial(LabPaths, Path(f"/tmp/{text}")),
        }
        for what, check in checks.items():
            try:
                check()
            except HpcToolkitError:
                continue
            taken[what] += 1
    MEASURED.append(f"hostile labs taken: {taken} of {len(HOSTILE) + len(ODD_BUT_FINE)}")
    assert 0 < taken["directory"] < 30
    assert taken["name"] < 5

    settings = LabSettings(nodes=1, gpus_per_node=0)
    with LabUnderTest(lab_directory / "-a@b+c_.d", settings) as odd:
        job = odd.sbatch("--output=/dev/null", "--wrap=hostname", cwd=lab_directory)
        assert odd.wait_for(job).state == "COMPLETED"


# --- jobs of an executor ---


@pytest.mark.slow
def test_workers_of_a_hostile_run_finish_it(
    call: Call, lab: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ODD_PLACE
    place.mkdir()
    names = (ODD_PLACE, "--evil {count_left} {0} %j \\ `touch canary`")
    runs = [sleeping(place / name) for name in names]

    monkeypatch.chdir(place)
    started = [submit(run, request(run, 1, LAB, {"mem": "200M", "time": 5})) for run in runs]
    with pytest.raises(HpcToolkitError, match="--run"):
        request(sleeping(tmp_path / "a\ntouch canary\n"), 1, LAB, {})

    for run, workers in zip(runs, started, strict=True):
        for job in workers:
            assert lab.wait_for(job.job).state == "COMPLETED"
        assert run.status().complete
    assert {path.name for path in place.iterdir()} == {*names, "slurm"}
    assert not list(tmp_path.rglob("canary"))
