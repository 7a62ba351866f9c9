"""The batch process of a job: its script, its environment, its nodes, and copies on their disks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_toolkit.queue.presence import DRAINING, FINISHED, RUNNING, Presence
from hpc_toolkit.slurm.batch import job, work
from hpc_toolkit.slurm.batch import node as preflight
from hpc_toolkit.slurm.batch.job import clean_environment
from hpc_toolkit.slurm.batch.node import StagingError, check_node, stage_paths, usable_gpus
from hpc_toolkit.slurm.batch.work import kept_nodes
from hpc_toolkit.slurm.client import Finished, SlurmError, SlurmFullError
from hpc_toolkit.slurm.records import script_options
from hpc_toolkit.system.processes import WARNING_NAMES
from hpc_toolkit.system.ranks import RankInfo
from tests.toyrun import ToyRun


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("#SBATCH --nodes=2", {"nodes": "2"}),
        ("#SBATCH --nodes 2 --no-kill -c4", {"nodes": "2", "no-kill": "", "cpus-per-task": "4"}),
        ("#SBATCH -c 4  # four", {"cpus-per-task": "4"}),
        ('#SBATCH --comment="a \\"b\\" --mem=4G"', {"comment": 'a "b" --mem=4G'}),
        ("#SBATCH --comment='open", {"comment": "'open"}),
        ("#SBATCH\t--signal=B:USR1@60", {"signal": "B:USR1@60"}),
        ("#SBATCH -J mine -o out/%j.log", {"job-name": "mine", "output": "out/%j.log"}),
        ("echo <<end\n#SBATCH --mem=4G\nend", {}),
        (" #SBATCH --mem=4G", {}),
        ("##SBATCH --mem=4G", {}),
    ],
)
def test_the_options_of_an_edited_script_are_read(line: str, found: dict[str, str]) -> None:
    assert script_options(f"#!/bin/bash\n\n{line}\n") == found


@pytest.mark.parametrize("rank", [{"RANK": "3"}, {}])
def test_variables_of_an_outer_job_or_rank_are_removed_and_those_of_the_options_kept(
    rank: dict[str, str],
) -> None:
    environ = dict.fromkeys(("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_STEP_ID"), "1")
    environ |= {"SLURM_CPU_BIND_LIST": "0x1", "SLURM_JOB_ID": "17", "PYTHONUNBUFFERED": "0"}
    kept = {} if rank else {"MASTER_PORT": "29500"}
    environ |= {"MASTER_PORT": "29500", **rank}

    clean_environment(environ, {"mem-per-cpu": "4G"})

    assert environ == {
        "SLURM_MEM_PER_CPU": "1",
        "SLURM_JOB_ID": "17",
        "SLURM_EXPORT_ENV": "ALL",
        "PYTHONUNBUFFERED": "0",
        **kept,
    }
    fresh: dict[str, str] = {}
    clean_environment(fresh, {})
    assert fresh.keys() == {"SLURM_EXPORT_ENV", "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(
    ("start", "lead", "noted", "warned"),
    [
        ("100", 300, False, True),
        ("100", 10, False, False),
        ("750", 300, False, False),  # the limit is shorter than the lead
        ("", 300, False, False),
        ("", 10, True, True),
    ],
)
def test_a_warning_that_came_too_early_for_python_is_known(
    monkeypatch: pytest.MonkeyPatch, start: str, lead: int, *, noted: bool, warned: bool
) -> None:
    monkeypatch.setattr("time.time", lambda: 800.0)
    for name in WARNING_NAMES.split():
        environ = {"HPCTK_WARNED": "1"} if noted else {}
        options = {"signal": f"B:{name}@{lead}"}
        assert job._was_warned(environ, options, start, 1000) is warned
        assert not environ


def test_a_directory_is_read_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = b"16|3|1|9|/other\n17|N/A|1|9|/d\xfc\nof two lines\n"
    monkeypatch.setattr(job, "answer", lambda *_, **__: Finished(0, "", "", listed))

    row = job._row("17")

    assert row is not None
    assert row["directory"] == os.fsdecode(b"/d\xfc\nof two lines")


# In a process of its own: a wakeup descriptor and handlers belong to the whole process.
QUEUE = """
import os, signal, subprocess
from hpc_toolkit.slurm.batch.job import Signals
signals = Signals()
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
found = [signals.next(5), signals.next(5), signals.next(0)]
child = subprocess.Popen(["bash", "-c", "kill -USR1 $$; exit 3"])
ended = signals.next(5)
print(*found, ended, child.wait())
"""


def test_signals_are_kept_in_order_and_children_have_the_default_actions() -> None:
    done = subprocess.run([sys.executable, "-c", QUEUE], capture_output=True, text=True, check=True)

    usr1, term, chld = signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD
    assert done.stdout.split() == [
        *(str(int(usr1)), str(int(term)), "None"),
        *(str(int(chld)), str(-int(usr1))),
    ]


NODES = ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("running", "left", "starting", "kept"),
    [
        (["n1", "n3"], ["n2", "n2"], True, ["n1", "n3"]),
        ([], NODES, True, ["n1"]),  # the script needs the first one
        # A node that never had ranks, once the job has started.
        (["n1", "n3"], [], False, ["n1", "n3"]),
        (["n2"], ["n2"], True, NODES),
    ],
)
@pytest.mark.parametrize("state", [RUNNING, DRAINING])
def test_a_node_whose_ranks_all_left_is_given_back(
    running: list[str], left: list[str], starting: bool, kept: list[str], state: str
) -> None:
    of: dict[str, Any] = {"worker": "w", "boot": "b", "pid": 1, "rank": 0}
    states = [*((host, state) for host in running), *((host, FINISHED) for host in left)]
    seen = [Presence(host=h, state=one, job="17", restart=1, **of) for h, one in states]
    job = RankInfo(job_id="17", restart=1)

    assert kept_nodes(NODES, seen, job, first="n1", starting=starting) == kept


@pytest.mark.parametrize(
    ("error", "left", "calls"),
    [(SlurmError, True, 3), (SlurmError, False, 1), (SlurmFullError, True, 1)],
)
def test_only_a_job_that_leaves_items_waits_for_slurm_until_its_end(
    error: type[SlurmError], left: bool, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LINGER_S", "_WATCH_S", "_ASK_AGAIN_S", "_FULL_S"):
        monkeypatch.setattr(work, name, 0.0)
    seen, log = list[dict[str, bool]](), list[str]()

    def send_others(job: str, name: str, **how: bool) -> float:
        seen.append(how)
        if len(seen) < 3:
            raise error("away")
        return 60.0

    one = SimpleNamespace(id="7", name="a", log=log.append, nodes=())
    batch: Any = SimpleNamespace(job=one, ended=False, receive_all=lambda: None)
    restarts: Any = None
    job = work.WorkJob(batch=batch, restarts=restarts, run=str(tmp_path), send_others=send_others)

    job._send_last(left=left)

    assert seen == [{"ends": True, "left": left}] * calls
    assert log == ["other jobs are not submitted yet: away"] * min(2, calls)


def driver(*gpus: dict[str, Any]) -> dict[str, Any]:
    """What NVIDIA's driver tells of a node."""
    return {"driver": "550.54", "cuda": 12040, "gpus": list(gpus)}


def visible(devices: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": devices}


GPU, LOST = {"name": "L40S", "total": 1, "free": 1}, {"error": "GPU is lost"}


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ask_driver", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HPCTK_HOST", "n3")


@pytest.mark.parametrize(
    ("environ", "told", "expected"),
    [
        *(({}, None, 0), ({}, driver(GPU, GPU), 2), (visible("0,1,2,3"), None, 4)),
        *((visible(""), None, 0), (visible("NoDevFiles"), None, 0)),
        *((visible("-1"), driver(GPU, GPU), 0), (visible("0,-1,1"), None, 1)),
        *((visible("GPU-8932,GPU-1c0f,"), None, 2), ({"ROCR_VISIBLE_DEVICES": "0,1"}, None, 2)),
        (visible("2"), driver(GPU, GPU, GPU, GPU), 1),
        *((visible("0,1"), driver(GPU, LOST), 1), (visible("0,1"), {"error": "reason 9"}, 0)),
        # NVML counts cards, of which each may be divided into several devices.
        *((visible("MIG-1,MIG-2"), driver(GPU), 2), (visible("GPU-8a,GPU-1c"), driver(GPU), 1)),
    ],
)
def test_gpus_count_that_are_granted_and_answer(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], told: Any, expected: int
) -> None:
    monkeypatch.setattr(preflight, "ask_driver", lambda: told)

    assert usable_gpus(environ) == expected


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        ({"f_bavail": 10}, "only 40.0 KiB are free for "),
        ({"f_favail": 7}, "room for 7 more files below "),
    ],
)
def test_a_full_filesystem_is_said(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, space: dict[str, int], problem: str
) -> None:
    plenty = {"f_bavail": 10**9, "f_frsize": 4096, "f_files": 10**6, "f_favail": 10**6}
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(**{**plenty, **space}))

    is_fit, line = check_node(toy.root, gpus=0, free_bytes=2**20)

    assert (is_fit, problem in line) == (False, True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory as models come: links to files that lie elsewhere."""
    blobs, root = tmp_path / "blobs", tmp_path / "it's a corpus"
    (root / "deep").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "weights").write_bytes(b"w" * 1000)
    (root / "weights").symlink_to("../blobs/weights")
    (root / "deep" / "tokens").write_text("tokens")
    (root / "deep").chmod(0o555)
    return root


def place(tmp_path: Path, restart: int = 0) -> Path:
    return tmp_path / f"hpctk-17.{restart}" / "n1"


def test_copies_hold_what_links_name_and_tell_their_users(source: Path, tmp_path: Path) -> None:
    target = place(tmp_path)

    told = stage_paths([source, source / "deep/tokens"], target, users=2)

    assert told.startswith("staged it's a corpus, tokens: 1012 B in ")
    assert (target / source.name / "weights").read_bytes() == b"w" * 1000
    assert not (target / source.name / "weights").is_symlink()
    assert (target / "tokens").read_text() == "tokens"
    assert sorted(path.name for path in (target / ".users").iterdir()) == ["0", "1"]
    # They can be removed whatever rights the source has.
    for path in (target, target / source.name / "deep"):
        assert path.stat().st_mode & 0o777 == 0o700


def test_what_an_earlier_start_left_is_removed_and_another_jobs_is_not(
    source: Path, tmp_path: Path
) -> None:
    stage_paths([source], place(tmp_path, 0), users=1)
    stage_paths([source], place(tmp_path, 1), users=1)
    other = tmp_path / "hpctk-18.0" / "n1"
    stage_paths([source], other, users=1)

    stage_paths([source], place(tmp_path, 2), users=1)

    assert not place(tmp_path, 0).parent.exists()
    assert not place(tmp_path, 1).parent.exists()
    assert other.exists()


def test_a_disk_without_the_room_is_told_and_left_as_it_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("hpc_toolkit.slurm.batch.node.shutil.disk_usage", lambda _: usage)

    with pytest.raises(StagingError, match=r"1006 B do not fit into 1000 B at .*n1"):
        stage_paths([source], place(tmp_path), users=1)

    assert not place(tmp_path).exists()


ODD = "it is neither a file nor"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        *((kind, "") for kind in ("missing", "nowhere", ".")),
        *((kind, ODD) for kind in ("pipe", "device", "/dev/null")),
    ],
)
def test_what_cannot_be_copied_is_refused_before_anything_is(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    path = Path("/dev/null") if kind == "device" else source / "odd"  # /dev/zero has no end
    if kind == "pipe":
        os.mkfifo(path)
    elif kind in ("nowhere", ".", "/dev/null"):
        path.symlink_to(kind)
    monkeypatch.setattr(
        "hpc_toolkit.slurm.batch.node.shutil.copyfile", lambda *_: pytest.fail("copied")
    )
    given = path if kind in ("missing", "device") else source

    with pytest.raises(StagingError, match=rf"cannot stage .*(odd|null).*{why}"):
        stage_paths([source / "weights", given], place(tmp_path), users=1)

    assert not place(tmp_path).parent.exists()


def test_a_directory_of_somebody_else_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path).parent.mkdir()
    monkeypatch.setattr("hpc_toolkit.slurm.batch.node.os.geteuid", lambda: 4711)

    with pytest.raises(StagingError, match=r"hpctk-17.0 belongs to another user"):
        stage_paths([source], place(tmp_path), users=1)
