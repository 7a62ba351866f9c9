"""What sites set in slurm.conf, and what a user of hpctk then sees: one Slurm for each variant.

In each, a run of 20 items is worked through on two nodes. Every item must be there once, and no
attempt may be charged for what the site does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpc_toolkit.lab.settings import LabSettings
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import wait_until
from tests.slurm.templatesite import ODD, Site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ITEMS = 20
RANKS = 4
DONE = ("COMPLETED", 0, 0)
FOUR_RANKS = ("--nodes", "2", "--ntasks-per-node", "2", "--cpus-per-task", "1")
MINE = ("--output", "%j.out", "--partition", "main", *FOUR_RANKS)
SMALL = (*MINE, "--time", "5", "--mem", "1G")
GENERIC = ("--cluster", "generic")
WHOLE = ("--cpus-per-task", "16")
"""All 32 CPUs of both nodes, so that an urgent job needs the job's."""


@dataclass(frozen=True)
class Variant:
    settings: dict[str, str]
    """Keys of slurm.conf with their values; "main" adds words to that partition's line."""
    request: tuple[str, ...] = SMALL
    event: str = ""
    """What is done to the job while all of its ranks are at work."""
    end: tuple[str, int, int] | None = DONE
    """State, exit code and restarts of the job; None if Slurm refuses it or never starts it."""
    rest: int = 0
    """Items that the job leaves for another one, at least."""
    says: dict[str, str] = field(default_factory=dict)
    """Words of hpctk, by the command that prints them: draft, submit, status."""
    lua: str = ""
    """The body of the site's plugin that sees each submission."""


REJECTS = 'slurm.log_user("no hours left: https://hpc.example.org/hours") return slurm.ERROR'
REWRITES = """
job_desc.partition = "urgent" job_desc.time_limit = 2 job_desc.account = "site"
slurm.log_user("time limit set to 2 minutes") return slurm.SUCCESS"""
PREEMPTED = "was preempted and does not restart; 'hpctk submit' continues the run"

VARIANTS = {
    "settings-that-change-nothing": Variant(
        {
            "JobRequeue": "0",
            "MpiDefault": "pmix",
            "EnforcePartLimits": "ALL",
            "DefMemPerCPU": "500",
            "MaxMemPerNode": "4000",
        },
        request=(*MINE, "--time", "5"),
        event="warn",
        end=("COMPLETED", 0, 1),
        says={"draft": 'mem_per_node = "4000M"'},
    ),
    "preempt-cancel": Variant(
        {"main": "PreemptMode=CANCEL"},
        event="preempt",
        end=("PREEMPTED", 75, 0),
        rest=1,
        says={
            "draft": "# PreemptMode=CANCEL: jobs here may have to give way to others",
            "status": PREEMPTED,
        },
    ),
    "too-long": Variant(
        {"EnforcePartLimits": "ALL", "main": "MaxTime=10"},
        request=(*GENERIC, *SMALL, "--time", "2:00:00"),
        end=None,
        says={"submit": "request less with --time", "draft": 'max_walltime = "00:10:00"'},
    ),
    "plugin-rejects": Variant(
        {"JobSubmitPlugins": "lua"},
        end=None,
        lua=REJECTS,
        says={
            "draft": "# choose_partition: left to the site (JobSubmitPlugins=lua)",
            "submit": "error: no hours left: https://hpc.example.org/hours",
        },
    ),
    "preempt-cancel-everywhere": Variant(
        {"PreemptMode": "CANCEL"},
        event="preempt",
        end=("PREEMPTED", 75, 0),
        rest=1,
        says={"status": PREEMPTED},
    ),
    "preempt-suspend": Variant(
        {"PreemptMode": "SUSPEND,GANG"},
        request=(*SMALL, *WHOLE),
        event="suspend",
        says={"draft": "# PreemptMode=GANG,SUSPEND: jobs here may have to give way to others"},
    ),
    "preempt-off": Variant(
        {"PreemptMode": "OFF", "PreemptType": "preempt/none"}, request=(*SMALL, *WHOLE)
    ),
    "kill-wait": Variant(
        {"KillWait": "1"},
        event="cancel",
        end=("CANCELLED", 75, 0),
        rest=1,
    ),
    "arrays": Variant(
        {"MaxArraySize": "5"},
        request=("command", "--array", "0-7", "--nodes", "1", "--mem", "100M", "--time", "5"),
        end=None,
        says={"draft": "max_array_size = 5", "submit": "submit parts: --array 0-4 --array-offset"},
    ),
    "arrays-wrong-file": Variant(
        {"MaxArraySize": "5"},
        request=("command", "--cluster", "lab", "--array", "0-7", "--mem", "100M", "--time", "5"),
        end=None,
        says={"submit": "an index must be less than MaxArraySize"},
    ),
    # sbatch retries for two minutes.
    "queue-full": Variant(
        {"MaxJobCount": "2"},
        request=(*SMALL, "--jobs", "2"),
        end=None,
        says={"submit": "the queue may be full (MaxJobCount)"},
    ),
    "plugin-rewrites": Variant(
        {"JobSubmitPlugins": "lua"},
        lua=REWRITES,
        says={"submit": "sbatch: time limit set to 2 minutes"},
    ),
    **{
        name: Variant(settings, request=request, says={"draft": 'mem_style = "none"'})
        for name, settings in {
            "cpus": {"SelectTypeParameters": "CR_CPU"},
            "cores": {"SelectTypeParameters": "CR_Core"},
            "linear": {"SelectType": "select/linear", "SelectTypeParameters": ""},
        }.items()
        for request in [(*MINE, "--time", "5")]
    },
    "affinity": Variant({"TaskPlugin": "task/affinity"}),
    "too-much-memory": Variant(
        {"EnforcePartLimits": "ALL", "MaxMemPerNode": "4000"},
        request=(*GENERIC, *MINE, "--mem", "8G"),
        end=None,
        says={"submit": "request less with --mem"},
    ),
    "exclusive": Variant(
        {"main": "OverSubscribe=EXCLUSIVE MinNodes=2"}, says={"draft": "min_nodes = 2"}
    ),
    "too-many-nodes": Variant(
        {"main": "MaxNodes=1"},
        request=(*GENERIC, *SMALL),
        end=None,
        says={"status": "MinNodes or MaxNodes of its partition: cancel it, change --nodes"},
    ),
    "resource-limits": Variant({"PropagateResourceLimits": "ALL"}),
    "interactive-step": Variant({"LaunchParameters": "use_interactive_step"}),
}


def edited(text: str, settings: dict[str, str]) -> str:
    """slurm.conf with other settings; a key without a value is left out."""
    for key, value in settings.items():
        if key == "main":
            text = re.sub(r"(?m)^(PartitionName=main .*)$", rf"\1 {value}", text)
            continue
        line = f"{key}={value}\n" if value else ""
        text = line + re.sub(rf"(?m)^{key}=.*\n", "", text)
    return text


@pytest.fixture
def variant(request: pytest.FixtureRequest) -> Variant:
    found: Variant = request.param
    return found


@pytest.fixture
def site(variant: Variant, lab_directory: Path, tmp_path: Path) -> Iterator[Site]:
    def edit(conf: str) -> str:
        plugin = f"function slurm_job_submit(job_desc, parts, uid)\n{variant.lua}\nend\n"
        plugin += "function slurm_job_modify() return slurm.SUCCESS end\n"
        (lab.lab.paths.etc / "job_submit.lua").write_text(plugin)
        return edited(conf, variant.settings)

    settings = LabSettings(nodes=2, gpus_per_node=0)
    lab = LabUnderTest(lab_directory / "variant", settings, edit=edit)
    with lab:
        yield Site(lab, tmp_path, environ={"XDG_CONFIG_HOME": str(tmp_path / "config")})


def urgent(site: Site, seconds: int) -> None:
    """Run a job that takes both nodes from the others."""
    options = ("--partition=urgent", "--nodes=2", "--ntasks-per-node=32", "--mem=1G")
    site.lab.wait_for(site.lab.sbatch(*options, f"--wrap=sleep {seconds}", "--output=/dev/null"))


def happen(site: Site, event: str, job: str) -> None:
    """Do to a job what the variant is about, then let its items end."""
    site.wait_for_held(RANKS)
    if event == "warn":
        site.warn_and_release(job)
        return
    if event == "cancel":
        site.lab.run("scancel", job)
    else:
        # Longer than the timeout of an item.
        urgent(site, 12 if event == "suspend" else 1)
    site.release()


def submitted(site: Site, variant: Variant) -> tuple[list[str], str]:
    """The jobs that Slurm took, and what hpctk printed for people."""
    own = variant.request[0] == "command"
    work = ("--", sys.executable, "-m", "hpc_toolkit", "work", ODD) if own else ("--run", ODD)
    done = site.call("submit", *variant.request, *work, check=False)
    refused = variant.end is None and "submit" in variant.says
    assert (done.returncode != 0) is refused, done.stderr
    return done.stdout.split(), done.stderr


def flat(text: str) -> str:
    return " ".join(text.split())


def left(site: Site) -> int:
    counts = site.status()["stages"]["items"]
    return int(counts["total"]) - int(counts["done"])


IN_MAKE_TEST = ("preempt-cancel", "too-long", "plugin-rejects")
CASES = [
    pytest.param(one, id=name, marks=[] if name in IN_MAKE_TEST else [pytest.mark.soak])
    for name, one in VARIANTS.items()
]


@pytest.mark.parametrize("variant", CASES, indirect=True)
def test_a_site_may_set(site: Site, variant: Variant) -> None:
    said = {"draft": site.call("cluster", "init", "mine", "--from-slurm", "-o", "-").stdout}
    site.call("cluster", "init", "mine", "--from-slurm")
    site.init_held(ITEMS, "--items-per-claim", "1", "--timeout", "10s")
    if not variant.event:
        site.release()

    jobs, said["submit"] = submitted(site, variant)
    if variant.event:
        happen(site, variant.event, jobs[0])
    ends = [site.end_of(job) for job in jobs] if variant.end else []
    if "status" in variant.says:
        wait_until(lambda: variant.says["status"] in flat(site.call("status", ODD).stdout), "why")
    said["status"] = flat(site.call("status", ODD).stdout)

    assert set(ends) == ({variant.end} if variant.end else set()), [*map(site.said, jobs)]
    for command, words_said in variant.says.items():
        assert words_said in said[command], said[command]
    if variant.rest:
        assert left(site) >= variant.rest
        # Another job finishes what this one left.
        assert site.end_of(site.call("submit", *SMALL, "--run", ODD).stdout.strip()) == DONE
    if variant.end:
        assert site.finished()["done"] == ITEMS
