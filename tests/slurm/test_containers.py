"""Ranks in containers on a real Slurm: what they see, and what passes through.

The programs are stand-ins, which record their arguments and start the command where it is. If
apptainer is installed, the tests run with it as well.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.slurm.containers import PROGRAMS
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import wait_until
from tests.slurm.templatesite import ODD, Site
from tests.slurm.test_templates import program

pytestmark = [pytest.mark.slow]

# Its helper stands in for that of real programs, which unpacks the image and which USR1 ends.
# That of enroot knows only the variables that it is given.
STAND_IN = """#!{python} -IS
import json, os, signal, subprocess, sys
words = sys.argv[1:]
with open({calls!r} + f"/{{os.environ['SLURM_PROCID']}}.{{os.getpid()}}.json", "w") as file:
    json.dump(words, file)
image = next(at for at, word in enumerate(words) if "my image" in word)
command = words[image + 1 :]
command = command[command[:1] == ["--"] :]
environ = dict(os.environ)
if {name!r} == "enroot":
    environ = {{"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}}
    for word in words[:image]:
        if word.startswith("--env="):
            name, _, value = word[6:].partition("=")
            environ[name] = value or os.environ[name]
helper = subprocess.Popen(["sleep", "600"])
child = subprocess.Popen(command, env=environ)
signal.signal(signal.SIGUSR1, lambda number, _: child.send_signal(number))
code = child.wait()
if helper.poll() is not None:
    sys.exit("the image is gone")
helper.kill()
sys.exit(code if code >= 0 else 128 - code)
"""
# pyxis is a plugin of srun, with options of its own.
SRUN = """#!{python} -IS
import json, os, sys
words = sys.argv[1:]
given = [word for word in words if word.startswith("--container-")]
if given:
    with open({calls!r} + f"/srun.{{os.getpid()}}.json", "w") as file:
        json.dump(given, file)
os.execv({srun!r}, ["srun", *(word for word in words if word not in given)])
"""
SEEN = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
RANK = f"""
import os, signal, sys
def end(number, frame):
    print("warned", flush=True)
    sys.exit(7)
signal.signal(signal.SIGUSR1, end)
open(os.path.join("/tmp", "hpctk-seen-" + os.environ["SLURM_JOB_ID"]), "a").close()
seen = [os.environ.get(name, "unset") for name in {SEEN!r}]
print("up", os.getcwd(), *seen, sys.argv[1:], flush=True)
while True:
    signal.pause()
"""


@dataclass(frozen=True)
class Kind:
    """A program that runs containers, and what a script that uses it is rendered from."""

    site: Site
    runtime: str
    image: str
    fields: dict[str, Any]
    calls: Path

    def submit(self, template: str, **fields: Any) -> str:
        return self.site.submit(
            template,
            container=self.image,
            site={"container_runtime": self.runtime},
            **self.fields,
            **fields,
        )


REAL = ("apptainer --userns",) if shutil.which("apptainer") else ()


# 'make soak' runs those of which test_rendered_script.py covers all words.
OFTEN = ("apptainer", "pyxis")
KINDS = [
    pytest.param(one, marks=[] if one in OFTEN else [pytest.mark.soak])
    for one in (*PROGRAMS, *REAL)
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, lab: LabUnderTest, tmp_path: Path) -> Kind:
    runtime: str = request.param
    cwd = tmp_path / "it's a site"
    calls = tmp_path / "calls"
    for directory in (cwd, calls):
        directory.mkdir()
    site = Site(lab, cwd)
    if runtime in REAL:
        return Kind(site, runtime, *_own_image(tmp_path / "image"), calls)
    facts = {"python": sys.executable, "calls": str(calls), "name": runtime}
    if runtime == "pyxis":
        program(tmp_path / "bin/srun", SRUN.format(srun=shutil.which("srun"), **facts))
    else:
        program(tmp_path / "bin" / runtime, STAND_IN.format(**facts))
    env = (("PATH", f"{tmp_path}/bin:{os.environ['PATH']}"),)
    return Kind(site, runtime, "my image", {"env": env}, calls)


def _own_image(image: Path) -> tuple[str, dict[str, Any]]:
    """An image with the programs and the interpreter of this machine."""
    shown = {"/usr", "/lib", "/lib64", "/bin", "/etc", sys.prefix, sys.base_prefix}
    shown |= {str(Path(__file__).parents[2]), os.path.realpath(sys.prefix)}
    binds = tuple(sorted(one for one in shown if os.path.isdir(one)))
    for directory in (*binds, "/proc", "/sys", "/dev", "/tmp", "/var/tmp", "/root"):
        (image / directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return str(image), {"bind": binds}


def test_ranks_see_their_job_and_the_warning_and_the_code_pass_through(kind: Kind) -> None:
    script = kind.site.cwd / "rank.py"
    script.write_text(RANK, encoding="utf-8")

    job = kind.submit(
        "command",
        command=(sys.executable, str(script), "a b"),
        gpus_per_node=2,
        cpus_per_task=1,
        signal="B:USR1@60",
    )
    wait_until(
        lambda: kind.site.said(job).count(": up ") == 4,
        lambda: kind.site.said(job),
        limit_s=60,
    )
    kind.site.lab.run("scancel", "--batch", "--signal=USR1", job)

    assert kind.site.end_of(job) == ("FAILED", 7, 0), kind.site.said(job)
    said = [line for line in kind.site.said(job).splitlines() if ": up " in line]
    expected = {
        f"{rank}: up {kind.site.cwd} {job} {rank} {rank % 2} 0,1 1 ['a b']" for rank in range(4)
    }
    assert {*said} == expected
    assert kind.site.said(job).count("warned") == 4
    os.unlink(f"/tmp/hpctk-seen-{job}")  # through the container's /tmp


def test_workers_in_a_container_process_a_run(kind: Kind) -> None:
    kind.site.init(8, 0.1)

    job = kind.submit("work-queue", container_python=sys.executable)

    assert kind.site.end_of(job) == ("COMPLETED", 0, 0), kind.site.said(job)
    assert kind.site.finished()["done"] == 8
    for call in kind.calls.iterdir():
        words = " ".join(json.loads(call.read_text(encoding="utf-8")))
        assert "/tmp:/tmp" in words  # where the run and its code are
    assert bool([*kind.calls.iterdir()]) is ("--userns" not in kind.runtime)


def test_a_plain_script_starts_its_program_in_the_container(kind: Kind) -> None:
    show = "import os, sys; print('in', os.getcwd(), os.environ['SLURM_PROCID'], sys.argv[1])"

    job = kind.submit(
        "command", command=(sys.executable, "-c", show, "it's"), plain=True, python=None
    )

    assert kind.site.end_of(job) == ("COMPLETED", 0, 0), kind.site.said(job)
    said = kind.site.said(job)
    assert {f"in {kind.site.cwd} {rank} it's" for rank in range(4)} <= {*said.splitlines()}
    assert ODD not in said
