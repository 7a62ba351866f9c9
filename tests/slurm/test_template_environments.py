"""What surrounds the ranks of a job: modules, conda, setup and teardown."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.templatesite import Site

pytestmark = [pytest.mark.slow]

# Reads a variable that nobody set, and fails in the middle, as such functions do.
UNCLEAN = 'echo "$NOBODY_SET_THIS" > /dev/null; false; grep -q nothing /dev/null'
LMOD = Path("/etc/profile.d/lmod.sh")


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def show(*names: str) -> tuple[str, ...]:
    """A program that prints variables."""
    words = " ".join(f"{name}=${{{name}-unset}}" for name in names)
    return ("bash", "-c", f'echo "{words}"')


def run(site: Site, /, *names: str, **fields: Any) -> str:
    """What one rank sees of these variables."""
    fields = {"nodes": 1, "ntasks_per_node": 1, **fields}
    job = site.submit("command", command=show(*names), **fields)
    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    return site.said(job)


def test_modules_and_conda_that_survive_no_strict_shell_are_loaded(site: Site) -> None:
    base = site.cwd / "conda base"
    activate = f'conda() {{ {UNCLEAN}; [[ $1 == activate ]] && export CONDA_GIVEN="$2"; }}'
    program(base / "etc/profile.d/conda.sh", f"{UNCLEAN}\n{activate}\n:")
    sourced = program(site.cwd / "my env.sh", f"{UNCLEAN}\nexport SOURCED=yes")
    load = f'() {{ {UNCLEAN}; export LOADED="$2"; }}'

    said = run(
        site,
        *("LOADED", "CONDA_GIVEN", "SOURCED", "GREETING"),
        shell={"BASH_FUNC_module%%": load},
        modules=("cuda/12.4",),
        conda=f"{base}/envs/torch",
        setup=(f"source {shlex.quote(str(sourced))}",),
        env=(("GREETING", "it's $5"),),
        site={"conda_base": str(base)},
    )

    assert f"LOADED=cuda/12.4 CONDA_GIVEN={base}/envs/torch SOURCED=yes GREETING=it's $5" in said


@pytest.mark.skipif(not LMOD.exists(), reason="needs Lmod, which /etc/profile.d sets up")
def test_a_login_shell_has_the_sites_modules_also_without_any_environment(site: Site) -> None:
    modules = site.cwd / "modules"
    program(modules / "tools/2.0.lua", 'setenv("TOOLS", "two")')
    used = program(site.cwd / "use.sh", f"module use {shlex.quote(str(modules))}")

    job = site.submit(
        "command",
        "--export=NONE",
        command=show("TOOLS"),
        setup=(f"source {shlex.quote(str(used))}", "module load tools"),
        site={"login_shell": True},
    )

    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    assert site.said(job).count("TOOLS=two") == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"modules": ("cuda/12.4",)},
            "error: cannot load module cuda/12.4",
            marks=pytest.mark.soak,
        ),
        ({"conda": "/nowhere/envs/x"}, "error: no conda in /nowhere"),
        ({"setup": ("source /nowhere.sh",)}, "error: setup failed: source /nowhere.sh"),
        ({"node_setup": ("ls /nowhere",)}, "error: the setup of a node failed: see above"),
    ],
)
def test_what_cannot_be_prepared_ends_the_job_and_is_torn_down(
    site: Site, fields: dict[str, Any], message: str
) -> None:
    job = site.submit("command", command=("true",), teardown=("touch torn-down",), **fields)

    assert site.end_of(job) == ("FAILED", 1, 0)
    assert message in site.said(job)
    assert (site.cwd / "torn-down").exists()


def test_setup_runs_once_a_node_and_teardown_after_a_rank_failed_and_ended_its_step(
    site: Site,
) -> None:
    # The node's name is in the file's, so two runs on one node would fail.
    program(site.cwd / "once.sh", '#!/bin/bash\nmkdir "ready-$SLURMD_NODENAME"')
    job = site.submit(
        "command",
        command=("bash", "-c", "(( SLURM_PROCID != 1 )) && sleep 300; exit 4"),
        node_setup=("true", "./once.sh"),
        teardown=("false", "cp -r ready-n1 kept", "exit 9"),
        nodelist="n[1-2]",
    )

    assert site.end_of(job) == ("FAILED", 4, 0)
    assert {path.name for path in site.cwd.glob("ready-*")} == {"ready-n1", "ready-n2"}
    assert (site.cwd / "kept").is_dir()
    assert "teardown failed: false" in site.said(job)


def test_teardown_comes_before_the_next_start(site: Site) -> None:
    program(site.cwd / "again.sh", '#!/bin/bash\nmkdir made && exit "${1:-75}"')
    job = site.submit("command", command=("./again.sh",), teardown=("rmdir made",), nodes=1,
                      ntasks_per_node=1, max_restarts=1)  # fmt: skip

    assert site.end_of(job) == ("FAILED", 75, 1), site.said(job)
    assert site.said(job).count("the step ended with code 75") == 2
