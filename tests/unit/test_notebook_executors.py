"""What submitit would be told: parameters, scripts and the environment. No Slurm is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit import notebook
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.notebook.executors import Resources
from hpc_toolkit.slurm.clusters.facts import Cluster, load_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import ScriptSpec, option, read_spec
from hpc_toolkit.slurm.render.values import PASSED
from tests.fakesbatch import KeptJobs, options

SITE = load_cluster("lab")


@pytest.fixture(autouse=True)
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptJobs:
    return KeptJobs(tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


def asked(folder: Path, site: Cluster = SITE, **resources: Any) -> dict[str, str]:
    return options(notebook.preview(notebook.executor(site, folder=folder, **resources)))


def test_every_resource_is_a_word_of_a_script() -> None:
    passed = {name.replace("-", "_") for name in PASSED}

    assert set(Resources.__annotations__) <= {field.name for field in fields(ScriptSpec)} | passed


@pytest.mark.parametrize("site", ["lab", "generic", "killarney"])
def test_an_executor_asks_for_what_a_rendered_script_asks_for(site: str, folder: Path) -> None:
    words: dict[str, Any] = {
        "nodes": 2,
        "gpus_per_node": 4,
        "time": "2:00:00",
        "account": "aip-x",
        "exclude": "n1,n[3-5]",
        "dependency": "afterok:12",
        "isolate_gpus": True,
    }
    cluster = load_cluster(site)

    found = asked(folder, cluster, comment="a comment of words", wckey="project", **words)

    passed = ("comment=a comment of words", "wckey=project")
    spec = read_spec({"python": sys.executable, "sbatch": passed, **words})
    script = options(render_script(spec, cluster))
    own = {"signal", "output", "error", "time", "open-mode"}
    assert {key: value for key, value in found.items() if key not in own} == {
        key: value for key, value in script.items() if key not in {*own, "no-kill"}
    }
    assert found["time"] == "120"
    assert found["signal"] == "USR2@300"
    assert found["open-mode"] == "append"


@pytest.mark.parametrize(
    ("given", "minutes"),
    [("1:00:00", 60), (90, 90), ("10:01", 11)],
)
def test_a_time_limit_reaches_submitit_in_whole_minutes(
    given: str | int, minutes: int, folder: Path
) -> None:
    executor: Any = notebook.executor(SITE, folder=folder, time=given)

    assert executor.parameters["time"] == minutes
    assert type(executor.parameters["time"]) is int
    assert options(notebook.preview(executor))["time"] == str(minutes)


@pytest.mark.parametrize("minutes", [1, 10, 15, 60, 4320])
def test_the_warning_comes_when_submitit_takes_it_for_a_timeout(minutes: int, folder: Path) -> None:
    executor: Any = notebook.executor(SITE, folder=folder, time=minutes)

    # submitit.core.job_environment.SignalHandler.has_timed_out; Slurm may be a minute early.
    guaranteed_s = min(minutes * 60 * 0.8, minutes * 60 - 600)
    assert minutes * 60 - executor.parameters["signal_delay_s"] - 60 >= guaranteed_s


HOSTILE = ["a\n#SBATCH --evil=1", "a\r#SBATCH --evil=1", "a\x00b", "a\x1b[2J", "a\u2028b"]
TEXTS = sorted(
    set(Resources.__annotations__)
    - {"nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task", "max_restarts"}
    - {"exclusive", "requeue", "modules", "setup", "env"}
)


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_a_control_character_is_refused_in_every_word(value: str, folder: Path) -> None:
    for word in TEXTS:
        resources: Any = {word: value}
        where = "--sbatch" if word.replace("_", "-") in PASSED else option(word)
        with pytest.raises(HpcToolkitError, match=where):
            notebook.executor(SITE, folder=folder, **resources)


@pytest.mark.parametrize(
    "resources",
    [
        {"modules": ["cuda\n#SBATCH --evil=1"]},
        {"setup": ["true\n#SBATCH --evil=1"]},
        {"setup": ["echo $(touch evil)"]},
        {"env": {"A": "b\n#SBATCH --evil=1"}},
        {"env": {"A; touch evil": "b"}},
    ],
    ids=str,
)
def test_what_surrounds_the_step_is_refused_as_in_a_script(resources: Any, folder: Path) -> None:
    with pytest.raises(HpcToolkitError, match=r"--(module|setup|env)"):
        notebook.executor(SITE, folder=folder, **resources)


def test_a_fact_with_a_newline_is_refused_where_no_file_was_checked(folder: Path) -> None:
    site = replace(SITE, gpu_type="l40s\n#SBATCH --evil=1")

    with pytest.raises(HpcToolkitError, match="--gpu-type"):
        notebook.executor(site, folder=folder, gpus_per_node=1)


def test_a_command_that_fails_before_the_step_ends_the_job(folder: Path, tmp_path: Path) -> None:
    site = replace(SITE, env=(("GREETING", "it's $HOME"),))
    executor = notebook.executor(site, folder=folder, setup=["sh -c 'exit 3'"])
    text = notebook.preview(executor).replace("srun", 'echo "$GREETING"; echo went on; srun')

    ended = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)

    assert ended.returncode == 1
    assert "went on" not in ended.stdout
    assert "hpctk: setup failed: sh -c exit 3" in ended.stderr
    assert not list(tmp_path.glob("evil"))


def test_a_site_whose_nodes_are_to_be_set_up_is_refused_with_its_file(folder: Path) -> None:
    site = replace(SITE, node_setup=("tar xf /data/set.tar -C /tmp",))

    with pytest.raises(ConfigError, match=r"clusters/lab\.toml: node_setup: .* once per") as it:
        notebook.executor(site, folder=folder)

    assert "node_setup=()" in it.value.hint


@pytest.mark.parametrize(
    ("resources", "match", "hint"),
    [
        ({"slurm_partition": "gpu"}, "slurm_partition: unknown resource", "mean 'partition'"),
        ({"gpus_per_nod": 4}, "gpus_per_nod: unknown resource", "did you mean 'gpus_per_node'"),
        ({"signal": "B:USR1@60"}, "signal: unknown resource", "known: "),
        ({"time": True}, "--time: True is not accepted", ""),
        ({"mem": 480}, "--mem: 480 is not accepted", ""),
        ({"modules": "cuda"}, "modules: 'cuda' is not a list", ""),
        ({"env": ["A=1"]}, r"env: \['A=1'\] is not a dict", ""),
        ({"nodes": "2"}, "--nodes: '2'", ""),
        ({"gpus_per_node": 5}, "--gpus-per-node: 5 is more than lab has", ""),
        ({"time": "4-00:00:00"}, "--time", ""),
    ],
    ids=str,
)
def test_a_resource_that_no_job_could_have_is_refused(
    resources: Any, match: str, hint: str, folder: Path
) -> None:
    with pytest.raises(HpcToolkitError, match=match) as error:
        notebook.executor(SITE, folder=folder, **resources)
    assert hint in error.value.hint


@pytest.mark.parametrize("name", ["50%", "back\\slash", "new\nline"])
def test_a_folder_that_slurm_would_read_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(HpcToolkitError, match="folder"):
        notebook.executor(SITE, folder=tmp_path / name)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="world-writable"):
        notebook.executor(SITE, folder=tmp_path)


def test_an_odd_folder_is_quoted(tmp_path: Path) -> None:
    place = tmp_path / 'it\'s a "folder" # of $HOME, é'

    assert asked(place)["output"] == f"{place}/%j_0_log.out"


def test_a_job_does_not_inherit_the_job_around_the_notebook(
    sbatch: KeptJobs,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    inherited = {
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_CPU": "4096",
        "SLURM_CPU_BIND": "mask_cpu:0x1",
        "SBATCH_PARTITION": "other",
        "SUBMITIT_EXECUTOR": "slurm",
        **dict.fromkeys(("RANK", "GROUP_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"), "3"),
    }
    kept = {"SLURM_CONF": "/etc/slurm/slurm.conf", "OWN": "1"}
    for name, value in {**inherited, **kept}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)

    notebook.executor(SITE, folder=folder).submit(int, 1)

    sent = sbatch.environ()
    assert not set(inherited) & set(sent)
    assert kept.items() <= sent.items()
    assert dict(os.environ) == before
    assert "overrides" not in capfd.readouterr().err
