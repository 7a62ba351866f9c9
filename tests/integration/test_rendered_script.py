"""A rendered script, run by bash with programs that stand in for Slurm's and for the interpreter.

The stand-ins record their arguments and answer as told. They show what the script does with an
answer, not that Slurm gives it: that takes a real Slurm.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render import script as render
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import read_spec
from hpc_toolkit.system.processes import WARNINGS
from tests.integration.realrun import HANG_S, wait_until

HOSTILE_NAME = 'it\'s a "run" $(touch canary) `touch canary` & ; é'

# A file per call, named by its time: two programs of a pipeline record themselves at once.
RECORD = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" > "$FAKE_DIR/calls/$EPOCHREALTIME.$$"
"""
SRUN = """
if [[ $* == *' preflight '* && -e $FAKE_DIR/srun_code ]]; then exit "$(<"$FAKE_DIR/srun_code")"; fi
if [[ $1 == --version ]]; then echo 'slurm 0.0-fake'; exit; fi
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""
SCONTROL = """
case "$*" in
  'show config') echo "KillWait = 2 sec"; echo "SLURM_VERSION   = $(cat "$FAKE_DIR/version")" ;;
  *'show partition'*) echo "LLN=NO PreemptMode=$(cat "$FAKE_DIR/preempt_mode") State=UP" ;;
  show*) cat "$FAKE_DIR/hosts" ;;
  requeue*) exit "$(cat "$FAKE_DIR/requeue_code")" ;;
esac
"""
SQUEUE = """
env -0 > "$FAKE_DIR/squeue.env"
case "$*" in
  *'--format=%A|%K|%S|%e|%Z')
    cd "$FAKE_DIR"
    echo "17|${SLURM_ARRAY_TASK_ID:-N/A}|$(cat start)|$(cat end)|$FAKE_DIR" ;;
  *--Format=State*)
    cd "$FAKE_DIR"
    echo "$(cat state) $(cat restarts) $(cat preempted) $(cat nodes)" ;;
esac
"""
SINFO = """
touch "$FAKE_DIR/asked_for_lost_nodes"
cat "$FAKE_DIR/lost_nodes"
"""
SCANCEL = """
kill -USR1 "$(cat "$FAKE_DIR/rank.pid")"
"""
# The interpreter: the real batch process, what a node says before the ranks start and what it
# stages, and the worker, or what a launcher or a script does.
PYTHON = """
if [[ $1 == -P ]]; then shift; fi
case $3 in
  batch) exec "$REAL_PYTHON" "$FAKE_DIR/batch.py" "$0" "${@:3}" ;;
  preflight) cat "$FAKE_DIR/ready"; exit "$(cat "$FAKE_DIR/preflight_code")" ;;
  campaign) exec "$FAKE_DIR/coordinator" ;;
  stage)
    for user in $(cat "$FAKE_DIR/users"); do mkdir -p "$4/n1/.users/$user"; done
    exit 0 ;;
esac
env -0 > "$FAKE_DIR/rank.env"
echo $$ > "$FAKE_DIR/rank.pid"
if [[ -e $FAKE_DIR/works_until_signalled ]]; then
  trap 'exit "$(cat "$FAKE_DIR/work_code")"' USR1 TERM
  touch "$FAKE_DIR/working"
  while :; do sleep 0.02; done
fi
exit "$(cat "$FAKE_DIR/work_code")"
"""
# The real batch process, which calls the interpreter above and is told what is left of the run.
BATCH = """
import os, sys
from pathlib import Path

fake, *words = sys.argv[1:]
sys.executable, sys.argv = fake, ["hpctk", *words]
from hpc_toolkit.cli import main
from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.left import Left
from hpc_toolkit.slurm.batch import work

told = Path(os.environ["FAKE_DIR"])


def left(run, watch_s):
    (told / "calls" / f"9{os.getpid()}").write_text(f"left\\0{run}\\0{watch_s:g}\\0")
    items, state, elsewhere = (told / "left").read_text().split()
    if (told / "left_code").read_text() != "0\\n":
        raise RunError("unreadable")
    return Left(int(items), state == "complete", int(elsewhere))


work.read_left = left
work._LOOK_S, work._TELL_S = 0.1, 0.5
main()
"""


@dataclass
class FakeSlurm:
    """A directory of stand-in programs, and the answers that they give."""

    root: Path
    python: Path
    environ: dict[str, str] = field(default_factory=dict)

    def answer(self, **answers: object) -> None:
        for name, text in answers.items():
            (self.root / name).write_text(f"{text}\n", encoding="utf-8")

    def left(self, count: int, *, complete: bool = False, elsewhere: int = 0) -> None:
        self.answer(left=f"{count} {'complete' if complete else 'open'} {elsewhere}")

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        path = self.root / "slurm_script"
        path.write_text(script, encoding="utf-8")
        return subprocess.Popen(
            ["bash", str(path), *arguments],
            cwd=self.root,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, *arguments: str) -> tuple[int, str]:
        process = self.start(script, *arguments)
        output, _ = process.communicate(timeout=HANG_S)
        return process.returncode, output

    def calls(self, program: str) -> list[list[str]]:
        records = [path.read_text("utf-8") for path in sorted((self.root / "calls").iterdir())]
        found = [record.split("\0")[:-1] for record in records]
        return [call[1:] for call in found if call[:1] == [program]]

    @property
    def requeued(self) -> bool:
        return ["requeue", "17"] in self.calls("scontrol")

    @property
    def rank_environ(self) -> dict[str, str]:
        pairs = (self.root / "rank.env").read_text(encoding="utf-8").split("\0")[:-1]
        return dict(pair.split("=", 1) for pair in pairs)


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    programs = tmp_path / "bin"
    programs.mkdir()
    home = tmp_path / HOSTILE_NAME
    home.mkdir()
    bodies = {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "sinfo": SINFO}
    for name, body in {**bodies, "scancel": SCANCEL}.items():
        (programs / name).write_text(RECORD + body, encoding="utf-8")
    (home / "python").write_text(RECORD + PYTHON, encoding="utf-8")
    for path in (*programs.iterdir(), home / "python"):
        path.chmod(0o755)
    (tmp_path / "batch.py").write_text(BATCH, encoding="utf-8")
    (tmp_path / "demo").mkdir()
    (tmp_path / "calls").mkdir()
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "FAKE_DIR": str(tmp_path),
        "REAL_PYTHON": sys.executable,
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_PARTITION": "main",
        "SLURM_CPUS_PER_TASK": "6",
        "SLURM_JOB_END_TIME": "1900000000",
        "HPCTK_DEADLINE": "1",
        "TZ": "UTC",
    }
    fake = FakeSlurm(tmp_path, home / "python", environ)
    fake.answer(hosts="n1\nn2", requeue_code=0, state="RUNNING", restarts=0, start=1, end="N/A")
    fake.answer(preempted="N/A", lost_nodes="", nodes=2, version="22.05.8", preempt_mode="REQUEUE")
    fake.answer(
        work_code=0, preflight_code=0, left_code=0, ready="n1: ready: 4 GPUs\nn2: ready: 4 GPUs"
    )
    fake.left(0, complete=True)
    return fake


def script_of(
    slurm: FakeSlurm,
    template: str = "work-queue",
    site: dict[str, Any] | None = None,
    **fields: Any,
) -> str:
    standard = {"python": str(slurm.python), "job_name": template, "nodes": 2}
    if template != "command":
        standard["run"] = "demo"
    cluster = replace(load_cluster("generic"), **site or {})
    return render_script(read_spec({**standard, **fields}), cluster, template)


def test_script_starts_one_worker_per_task_with_the_flags_of_a_queue(slurm: FakeSlurm) -> None:
    code, output = slurm.run(script_of(slurm))

    assert code == 0, output
    step = slurm.calls("srun")[-1]
    assert step == [
        *("--mpi=none", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--label"),
        "--cpus-per-task=6",
        *("--nodes=2", str(slurm.python), "-Pm", "hpc_toolkit", "work", "demo"),
    ]
    assert not slurm.requeued


def test_one_rank_is_the_only_task_of_the_job_and_needs_every_node(slurm: FakeSlurm) -> None:
    slurm.environ["SLURM_NTASKS_PER_NODE"] = "4"
    script = script_of(slurm, one_rank=True, workers_per_task=3, cpus_per_task=6)
    code, output = slurm.run(script)

    assert code == 0, output
    assert "#SBATCH --no-kill" not in script
    step = slurm.calls("srun")[-1]
    assert {"--nodes=1", "--ntasks=1", "--ntasks-per-node=1"} <= set(step)
    assert step[-2:] == ["demo", "--workers=3"]

    slurm.answer(preflight_code=1, ready="n2: ready: 4 GPUs")
    code, output = slurm.run(script)

    assert code == 1
    assert "error: a node failed the preflight: see above" in output


def test_hostile_values_arrive_as_they_were_written(slurm: FakeSlurm) -> None:
    (slurm.root / HOSTILE_NAME / "run").mkdir()
    run = f"{HOSTILE_NAME}/run"
    setup = f"export SETUP={shlex.quote('a b')}"

    code, output = slurm.run(
        script_of(slurm, run=run, env=(("VALUE", HOSTILE_NAME),), setup=(setup,))
    )

    assert code == 0, output
    assert ["-Pm", "hpc_toolkit", "work", run] in slurm.calls("python")
    assert slurm.calls("left") == [[run, "60"]]
    assert slurm.rank_environ["VALUE"] == HOSTILE_NAME
    assert slurm.rank_environ["SETUP"] == "a b"
    assert not list(slurm.root.rglob("canary"))


ODD = (HOSTILE_NAME, " *?[a-z]{a,b}~!! \\ %j ", "{{ 7*7 }}{% raw %}<#--", "--help")


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("environment", ["conda", "venv"])
def test_hostile_words_of_the_surroundings_are_passed_on_as_they_are(
    slurm: FakeSlurm, text: str, environment: str
) -> None:
    home = slurm.root / "e" / text
    (home / "etc/profile.d").mkdir(parents=True)
    (home / "etc/profile.d/conda.sh").write_text('conda() { record conda "$@"; }\n')
    for name in ("record", "module", "apptainer"):
        stand_in(slurm, name, CONTAINER if name == "apptainer" else "")
    line = "record 'a b' --c=%d"
    fields: dict[str, Any] = {
        environment: str(home if environment == "venv" else home / "envs" / text),
        "setup": (line,),
        "node_setup": (f"{line} node",),
        "teardown": (f"{line} after",),
        "command": ("record", "program", text),
    }
    if "," not in text:
        fields |= {"container": f"/x/{text}.sif", "bind": (f"/x/{text}",)}
    site = {
        "conda_base": str(home),
        "env": (("OF_SITE", text),),
        "modules": ("a",),
        "container_runtime": "apptainer",
    }

    code, output = slurm.run(script_of(slurm, "command", site, **fields), text)

    assert code == 0, output
    activated = [["conda", "activate", fields["conda"]]] if environment == "conda" else []
    told = ["a b", "--c=%d"]  # a line of more than plain words is refused
    own = [told, [*told, "node"], ["program", text, text], [*told, "after"]]
    flags = {"--kill-on-bad-exit=1", "--wait=60", "--label", "--cpus-per-task=6"}
    assert flags <= {*slurm.calls("srun")[-1]}
    assert slurm.calls("record") == [*activated, *own]
    assert slurm.calls("module") == [["load", "a"]]
    if "container" in fields:
        (inside,) = slurm.calls("apptainer")
        assert {f"/x/{text}.sif", f"--bind=/x/{text}:/x/{text}"} <= set(inside)
    assert not list(slurm.root.rglob("canary"))


def test_no_variable_of_bash_or_the_script_can_be_set_unless_it_is_exported_as_asked(
    slurm: FakeSlurm,
) -> None:
    """Or a variable of the user's would name another job to the script's scancel."""
    every = subprocess.run(["bash", "-c", "compgen -v"], capture_output=True, check=True, text=True)
    lines = [
        line.strip()
        for template in ("base", "plain", *render.template_names())
        for line in render._source(template + ".sbatch.j2").splitlines()
        if not line.startswith("#")
    ]
    own = {name for line in lines for name in re.findall(r"(?:^|[\s;(])([A-Za-z_]\w*)\+?=", line)}
    assert {"OMP_NUM_THREADS", "VIRTUAL_ENV", "HPCTK_WARNED"} <= own
    given = {}
    for name in sorted({*every.stdout.split(), *own} - {"PATH", "LC_CTYPE"}):
        try:
            read_spec({"python": "/p", "env": ((name, "7"),)})
        except HpcToolkitError:
            continue
        given[name] = "7"
    # A script without hpctk sets the last two itself, for a step of several nodes.
    known = {"OMP_NUM_THREADS", "VIRTUAL_ENV", "MASTER_ADDR", "MASTER_PORT"}
    assert own & given.keys() <= known

    tell = ("bash", "-c", 'env -0 > "$FAKE_DIR/rank.env"')
    code, output = slurm.run(script_of(slurm, "command", command=tell, env=tuple(given.items())))

    assert code == 0, output
    assert given.items() <= slurm.rank_environ.items()


@pytest.mark.parametrize(
    ("end", "deadline"), [("1900000000", "1900000000"), ("N/A", None), ("", None)]
)
def test_deadline_comes_from_squeue_where_slurm_does_not_set_it(
    slurm: FakeSlurm, end: str, deadline: str | None
) -> None:
    del slurm.environ["SLURM_JOB_END_TIME"]
    slurm.environ |= {"SLURM_TIME_FORMAT": "relative", "SQUEUE_STATES": "PENDING"}
    slurm.answer(end=end)

    code, _ = slurm.run(script_of(slurm))

    assert code == 0
    assert slurm.rank_environ.get("HPCTK_DEADLINE") == deadline
    # The questions are the script's, and the variables the user's.
    asked = (slurm.root / "squeue.env").read_text(encoding="utf-8").split("\0")
    assert "SLURM_TIME_FORMAT=%s" in asked
    assert not [pair for pair in asked if pair.startswith("SQUEUE_")]
    assert slurm.rank_environ["SQUEUE_STATES"] == "PENDING"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda slurm: (slurm.root / "demo").rmdir(), "error: no run directory demo"),
        (
            lambda slurm: slurm.answer(hosts="n1"),
            "error: the job has 2 nodes, but scontrol names 1",
        ),
        (lambda slurm: slurm.environ.pop("SLURM_JOB_ID"), "error: this is not a Slurm job"),
        (
            lambda slurm: slurm.answer(preflight_code=1, ready="n2: no GPU"),
            "error: no node is fit for this job: see above",
        ),
        *(
            (lambda slurm, code=code: slurm.answer(srun_code=code), "error: no node is fit for")
            for code in (1, 139, 255)
        ),
        # How many ranks a node has is Slurm's choice: nobody could say how many are left.
        (
            lambda slurm: slurm.answer(preflight_code=1, ready="n2: ready: 4 GPUs"),
            "error: a node failed the preflight: see above",
        ),
    ],
)
def test_what_cannot_work_is_said_before_a_step_starts(
    slurm: FakeSlurm, break_it: Any, message: str
) -> None:
    script = script_of(slurm)
    break_it(slurm)

    code, output = slurm.run(script)

    assert (code, slurm.requeued) == (1, False)
    assert message in output
    assert not [call for call in slurm.calls("srun") if "work" in call]


@pytest.mark.parametrize("silent", [False, True])
def test_a_setup_that_moves_is_told_and_taken_back(slurm: FakeSlurm, *, silent: bool) -> None:
    (slurm.root / "else where").mkdir()
    if silent:
        (slurm.root / "bin/squeue").write_text("#!/bin/bash\nexit 1\n")

    code, output = slurm.run(script_of(slurm, setup=("cd 'else where'", "touch there")))

    assert code == 0, output
    assert (slurm.root / "else where/there").exists()
    assert f"the setup moved to {slurm.root}/else where, back to {slurm.root}:" in output


@pytest.mark.parametrize(
    ("template", "srun_code", "lost_nodes", "nodes"),
    [
        ("work-queue", 137, "", 2),
        ("command", 233, "", 2),
        ("work-queue", 1, "n2 1 main down* ", 2),  # srun(1), --immediate, on 22.05
        ("command", 1, "", 1),  # the lost node is idle again
    ],
)
def test_a_node_that_is_lost_before_it_was_checked_lets_the_job_start_again(
    slurm: FakeSlurm, template: str, srun_code: int, lost_nodes: str, nodes: int
) -> None:
    slurm.answer(srun_code=srun_code, lost_nodes=lost_nodes, nodes=nodes)
    program: dict[str, Any] = {"command": ("true",)} if template == "command" else {}

    code, output = slurm.run(script_of(slurm, template, **program))
    once, refusal = slurm.run(script_of(slurm, template, requeue=False, **program))

    assert code == 0, output
    assert "a node was lost before the preflight was complete: see above" in output
    assert slurm.requeued
    assert once == 75
    assert "not requeued: --no-requeue" in refusal


UNREADABLE: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("work_code", "left", "expected", "requeued"),
    [
        (0, {"count": 0, "complete": True}, 0, False),
        (139, {"count": 0, "complete": True}, 0, False),  # the others did what a rank crashed at
        (75, {"count": 0}, 0, False),  # the run is open, and nothing is left to do now
        (1, {"count": 5}, 1, False),  # an error that the next start would meet again
        (2, {"count": 5}, 2, False),
        *((code, {"count": 1}, 0, True) for code in (0, 75, 137)),  # whatever a rank died of
        (75, {"count": 1, "elsewhere": 1}, 75, False),
        (75, {"count": 2, "elsewhere": 1}, 0, True),
        # Then the exit code decides.
        (0, UNREADABLE, 0, False),
        (75, UNREADABLE, 0, True),
    ],
)
def test_a_job_is_requeued_for_items_that_it_could_do(
    slurm: FakeSlurm, work_code: int, left: dict[str, Any], expected: int, *, requeued: bool
) -> None:
    slurm.answer(work_code=work_code, left_code=int(not left))
    slurm.left(**{"count": 0, **left})

    code, output = slurm.run(script_of(slurm))

    assert (code, slurm.requeued) == (expected, requeued), output
    others = "not requeued: workers of other jobs hold all that is left" in output
    assert others is (left.get("elsewhere") == left.get("count", 0))
    assert ("items left: unknown" in output) is (not left)


@pytest.mark.parametrize(
    ("fields", "answers", "restarts"),
    [
        ({"requeue": False}, {}, "0"),
        ({"max_restarts": 2}, {}, "2"),
        ({}, {"state": "COMPLETING"}, "0"),
        ({}, {"state": ""}, "0"),
        ({}, {"state": "RUNNING\nRUNNING"}, "0"),
        ({}, {"requeue_code": 1}, "0"),
    ],
)
def test_a_job_that_may_not_start_again_exits_75(
    slurm: FakeSlurm, fields: dict[str, Any], answers: dict[str, Any], restarts: str
) -> None:
    slurm.answer(work_code=75, restarts=restarts)
    slurm.answer(**answers)
    slurm.left(1)

    code, output = slurm.run(script_of(slurm, **fields))

    assert code == 75, output
    assert slurm.requeued is ("requeue_code" in answers)


def start_a_rank(slurm: FakeSlurm, script: str) -> subprocess.Popen[str]:
    """Start a script whose rank works until it gets a signal; returns when it works."""
    slurm.answer(works_until_signalled="")
    process = slurm.start(script)
    wait_until((slurm.root / "working").exists, "the rank to work")
    return process


@pytest.mark.parametrize("lost", [False, True])
def test_the_teardown_does_not_wait_for_the_ranks_of_a_lost_node(
    slurm: FakeSlurm, *, lost: bool
) -> None:
    slurm.answer(work_code=75, lost_nodes="n2 1 main down*" if lost else "")
    slurm.left(1)
    process = start_a_rank(slurm, script_of(slurm, teardown=("touch torn-down",)))

    process.send_signal(signal.SIGTERM)
    wait_until((slurm.root / "asked_for_lost_nodes").exists, "the question for lost nodes")
    if lost:
        assert process.wait(timeout=20) == 143
        assert (slurm.root / "torn-down").exists()
    # The rank has saved by now.
    os.kill(int((slurm.root / "rank.pid").read_text()), signal.SIGTERM)
    output, _ = process.communicate(timeout=20)

    assert ("srun still waits for a lost node; exiting" in output) is lost, output
    assert process.returncode == (143 if lost else 75)
    assert (slurm.root / "torn-down").exists()


@pytest.mark.parametrize(
    ("number", "work_code", "expected"),
    [*((number, 1, 0) for number in WARNINGS), (signal.SIGTERM, 75, 75)],
)
def test_a_warned_job_is_requeued_and_a_cancelled_one_is_not(
    slurm: FakeSlurm, number: signal.Signals, work_code: int, expected: int
) -> None:
    slurm.answer(work_code=work_code)
    slurm.left(1, elsewhere=1)
    process = start_a_rank(slurm, script_of(slurm))

    process.send_signal(number)
    if number == signal.SIGTERM:
        # Slurm sends it to the ranks as well.
        os.kill(int((slurm.root / "rank.pid").read_text()), number)
    output, _ = process.communicate(timeout=HANG_S)

    assert process.returncode == expected, output
    assert slurm.requeued is (expected == 0)


CONTAINERS = ("apptainer", "singularity", "pyxis", "enroot", "shifter", "podman-hpc")
# Stands in for the program that runs containers: it skips its own words, and starts the command.
CONTAINER = """
for word; do shift; case $word in *.sif|--) [[ $1 = -- ]] || break ;; esac; done
exec "$@"
"""


def stand_in(slurm: FakeSlurm, name: str, body: str) -> None:
    path = slurm.root / "bin" / name
    path.write_text(RECORD + body, encoding="utf-8")
    path.chmod(0o755)


def in_container(slurm: FakeSlurm, name: str, here: Path, *shown: str) -> list[str]:
    """The words of a program that starts a command in the image 'a b.sif', and shows it these."""
    cache = str(Path.home() / ".cache")
    own = ["/tmp", *([cache] if os.path.isdir(cache) else [])]
    names = [*own, *([] if str(here).startswith("/tmp/") else [str(here)]), *shown]
    pairs = [one if ":" in one else f"{one}:{one}" for one in names]
    fstab = [f"{':'.join(one.split(':')[:2])}:none:x-create=auto,rbind" for one in pairs]
    fstab = [f + ",ro" * one.endswith(":ro") for f, one in zip(fstab, pairs, strict=True)]
    return {
        "apptainer": ["exec", *(f"--bind={one}" for one in pairs), f"--pwd={here}", "a b.sif"],
        "singularity": ["exec", *(f"--bind={one}" for one in pairs), f"--pwd={here}", "a b.sif"],
        "pyxis": [
            f"--container-mounts={','.join(pairs)}",
            f"--container-workdir={here}",
            "--container-image=a b.sif",
        ],
        "enroot": [
            *("start", *(f"--mount={one}" for one in fstab), "a b.sif"),
            *("sh", "-c", 'cd "$0" && exec "$@"', str(here)),
        ],
        "shifter": [f"--volume={';'.join(pairs)}", f"--workdir={here}", "--image=a b.sif", "--"],
        "podman-hpc": [
            *("run", "--rm", "--env-host", "--network=host", "--uts=host", "--pid=host"),
            *("--ipc=host", "--user=0", "--entrypoint=", "--security-opt=label=disable"),
            *(f"--volume={one}" for one in pairs),
            *(f"--workdir={here}", "a b.sif"),
        ],
    }[name]


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_checks_and_the_ranks_run_in_the_container(slurm: FakeSlurm, name: str) -> None:
    stand_in(slurm, name, CONTAINER)
    site = {"binds": ("/scratch",), "container_runtime": name}

    inside: dict[str, Any] = {"container": "a b.sif", "container_python": str(slurm.python)}
    code, output = slurm.run(script_of(slurm, site=site, bind=("/x:/y:ro",), **inside))

    assert code == 0, output
    words = in_container(slurm, name, slurm.root, "/scratch", "/x:/y:ro")
    words += [str(slurm.python), "-Pm", "hpc_toolkit"]
    calls = [one for one in slurm.calls("srun" if name == "pyxis" else name) if len(one) > 1]
    at = [call.index(words[0]) for call in calls]
    if name == "enroot":  # which gets the variables first
        at = [call.index(words[1]) - 1 for call in calls]
        assert all({"--env=SLURM_JOB_ID", "--env=FAKE_DIR"} <= {*call} for call in calls)
        calls = [["start", *call[first + 1 :]] for call, first in zip(calls, at, strict=True)]
        at = [0] * len(calls)
    for call, first in zip(calls, at, strict=True):
        assert call[first : first + len(words)] == words
    found = [call[first + len(words)] for call, first in zip(calls, at, strict=True)]
    assert found == ["preflight", "work"]


@pytest.mark.parametrize(
    ("name", "plain"), [*((name, False) for name in CONTAINERS), ("enroot", True), ("pyxis", True)]
)
def test_a_program_runs_in_the_container_and_the_checks_outside(
    slurm: FakeSlurm, name: str, plain: bool
) -> None:
    stand_in(slurm, name, CONTAINER)
    fields = {"container": "a b.sif", "command": ("printf", "<%s>", "a b"), "plain": plain}
    fields["python"] = None if plain else str(slurm.python)

    code, output = slurm.run(
        script_of(slurm, "command", site={"container_runtime": name}, **fields), "c"
    )

    assert code == 0, output
    assert "<a b><c>" in output
    steps = [call for call in slurm.calls("srun") if call != ["--version"]]
    assert sum(f"--workdir={slurm.root}" in " ".join(one) for one in steps) == (
        name in ("shifter", "podman-hpc")
    )
    assert len(slurm.calls(name)) == (name != "pyxis")
    assert len(steps) == 1 if plain else not [w for w in steps[0] if w.startswith("--container")]


@pytest.mark.parametrize("name", ["apptainer", "pyxis"])
def test_a_run_that_no_container_can_be_shown_is_refused(slurm: FakeSlurm, name: str) -> None:
    (slurm.root / "a,b").mkdir()
    site = {"container_runtime": name}

    inside = {"container": "x.sif", "container_python": "/p", "run": "a,b"}
    code, output = slurm.run(script_of(slurm, site=site, **inside))

    assert code == 1
    assert f"{name} cannot show {slurm.root}/a,b: ',' separate paths" in output


def test_a_script_forgets_what_an_outer_job_left_behind(slurm: FakeSlurm) -> None:
    left_behind = {
        *("SLURM_MEM_PER_NODE", "SLURM_GPUS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND_LIST"),
        *("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_TRES_PER_TASK", "SRUN_CPUS_PER_TASK"),
        *("SLURM_LABELIO", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS_PER_NODE"),
    }
    slurm.environ |= dict.fromkeys(left_behind, "1")
    slurm.environ["SLURM_MEM_PER_CPU"] = "4096"

    shares: dict[str, Any] = {"ntasks": 3, "cpus_per_gpu": 2, "gpus_per_node": 1}
    site = {"gpu_request": "gres"}
    code, output = slurm.run(script_of(slurm, mem_per_cpu="4G", site=site, **shares))

    assert code == 0, output
    assert not left_behind & slurm.rank_environ.keys()
    assert slurm.rank_environ["SLURM_MEM_PER_CPU"] == "4096"


@pytest.mark.parametrize(("preempted", "expected"), [("N/A", 1), ("1900000000", 0)])
def test_a_program_that_a_preemption_cut_short_starts_again(
    slurm: FakeSlurm, preempted: str, expected: int
) -> None:
    slurm.answer(preempted=preempted)
    # As Slurm does within the grace of a preemption: the task is told, and the script is not.
    program = ("bash", "-c", "kill $PPID; kill $$; sleep 9")

    code, output = slurm.run(script_of(slurm, "command", command=program))

    assert "cut short (SIGTERM)" in output
    assert "the step ended with code 1" in output
    assert code == expected, output
    assert slurm.requeued is (expected == 0)


@pytest.mark.parametrize(
    ("version", "mode", "by_slurm"),
    [
        ("23.11.10", "REQUEUE", False),
        ("24.05.0", "REQUEUE", True),
        ("26.05.5-1", "GANG,REQUEUE", True),
        ("24.11.5", "CANCEL", False),
        ("", "REQUEUE", False),
    ],
)
def test_a_preempted_job_is_requeued_by_slurm_from_24_05_on(
    slurm: FakeSlurm, version: str, mode: str, *, by_slurm: bool
) -> None:
    slurm.answer(preempted="1900000000", version=version, preempt_mode=mode)
    program = script_of(slurm, "command", command=("bash", "-c", "exit 3"))
    slurm.answer(work_code=75)
    slurm.left(5)

    for script in (program, script_of(slurm)):
        shutil.rmtree(slurm.root / "calls")
        (slurm.root / "calls").mkdir()
        code, output = slurm.run(script)

        assert (code, slurm.requeued) == ((75, False) if by_slurm else (0, True)), output


@pytest.mark.parametrize(
    ("preempted", "restarts", "version", "updated"),
    [
        ("1900000000", 0, "24.11.5", True),
        ("N/A", 1, "24.11.5", True),  # it may have outlived the grace of its first start
        ("N/A", 0, "24.11.5", False),
        ("1900000000", 1, "22.05.8", False),
    ],
)
def test_a_finished_program_is_not_started_again_by_slurm(
    slurm: FakeSlurm, preempted: str, restarts: int, version: str, *, updated: bool
) -> None:
    slurm.environ["SLURM_RESTART_COUNT"] = str(restarts)
    slurm.answer(preempted=preempted, version=version)

    code, output = slurm.run(script_of(slurm, "command", command=("true",)))

    assert code == 0, output
    assert (["update", "JobId=17", "Requeue=0"] in slurm.calls("scontrol")) is updated


def test_a_campaign_with_decisions_left_is_requeued_although_no_item_is(slurm: FakeSlurm) -> None:
    slurm.answer(work_code=75, coordinator="#!/bin/bash\nexec /bin/sleep 30")
    (slurm.root / "coordinator").chmod(0o755)
    slurm.left(0)

    code, output = slurm.run(script_of(slurm, "campaign"))

    assert code == 0, output
    assert slurm.requeued
