"""The contract of the command line: exit codes, what stdout carries, JSON, files, finding RUN."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_toolkit.cli.runs import try_
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.values import natural
from tests.integration.realrun import Hpctk

NOOP = "hpc_toolkit.science.workloads.synthetic:Noop"
ODD_NAMES = ["a b #x 100%s", "a'; touch pwned", 'a"=0"\\=0', "a\nb", "-dash ü→漢"]


def test_stdout_carries_data_only(hpctk: Hpctk) -> None:
    init = hpctk("init", "run", "--items", "-", "--workload", NOOP, "--open", stdin='{"id": 1}')
    add = hpctk("add", "run", "--items", "-", stdin='{"id": 2}')
    seal = hpctk("seal", "run")
    work = hpctk("work", "run")
    retry = hpctk("retry", "run")
    gather = hpctk("gather", "run")

    assert [ended.code for ended in (init, add, seal, work, retry, gather)] == [0] * 6
    assert init.out == "run\n"
    assert [ended.out for ended in (add, seal, work, retry)] == [""] * 4
    assert [json.loads(line)["item"] for line in gather.out.splitlines()] == [{"id": 1}, {"id": 2}]


def test_check_of_all_runs_exits_with_1_if_one_failed_or_cannot_be_read(hpctk: Hpctk) -> None:
    hpctk.make([{}], name="runs/good")
    hpctk.make([{}], name="runs/new")
    assert hpctk("work", "runs/good").code == 0
    assert hpctk("status", "--check").code == 0

    hpctk.make([{"how": "memory"}], name="runs/bad", max_attempts=1)
    assert hpctk("work", "runs/bad").code == 0
    checks = {"runs/good": 0, "runs/bad": 1, "--json": 1}
    assert {word: hpctk("status", word, "--check").code for word in checks} == checks
    assert hpctk("status", "--check").code == 1
    assert hpctk("status").code == 0
    assert "1 x MemoryError" in hpctk("status", "runs/bad").out

    (hpctk.cwd / "runs/bad/run.json").write_text("{")
    damaged = hpctk("status", "--check")
    assert damaged.code == 1
    assert "runs/good" in damaged.out
    assert "runs/bad/run.json is damaged" in damaged.err


def test_try_shows_what_work_records(
    hpctk: Hpctk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        "print('printed') or {'a': (1, 2)}",
        "{'a': __import__('numpy').float32(0.5)}",
        "{'a': __import__('numpy').ones(2)}",
        "{'a': [1.0, float('nan')]}",
        "{'a': {1}}",
        "[1]",
        "None",
        "(one for one in ())",
        "exit('no')",
        "next(iter(()))",
        "(_ for _ in ()).throw(PermanentError('never', hint='stop'))",
    ]
    items = [{"give": one} for one in given]
    run = hpctk.make(items, "sample_workloads:give", max_attempts=1)
    hpctk("work", "run")
    monkeypatch.chdir(run.root.parent)

    for row in run.results():
        capsys.readouterr()
        error = ""
        try:
            try_("run", item=str(row["item"]["id"]))
        except HpcToolkitError as failure:
            error = failure.message.removeprefix("the item failed, and nothing was recorded: ")
        shown = capsys.readouterr().out.removeprefix("printed\n") or "null"
        assert (json.loads(shown), error or None) == (natural(row["value"]), row["error"])


def test_logs_of_an_item_are_what_it_printed(hpctk: Hpctk) -> None:
    hpctk.worked([{}, {"fail": True}, {}], "sample_workloads:speak", max_attempts=2, workers=1)

    one = hpctk("logs", "run", "--item", "1")
    as_json = [
        json.loads(line) for line in hpctk("logs", "run", "--item", "2", "--json").out.splitlines()
    ]
    all_of_it = hpctk("logs", "run").out

    assert one.out == "hello from 1\nchild of 1\n" * 2
    assert one.err.count("--- ") == 2
    assert [part["text"] for part in as_json] == ["hello from 2\nchild of 2\n"]
    assert all_of_it.count("hello from") == 4


def test_run_may_be_left_out_where_only_one_is_meant(hpctk: Hpctk) -> None:
    hpctk.cwd.joinpath("runs").mkdir()
    hpctk.make([{}], name="runs/only")

    assert hpctk("status", "--json").json["run"] == "runs/only"
    hpctk.make([{}, {}], name="runs/second")
    named = hpctk("status", "--json", env={"HPCTK_RUN": "runs/second"}).json
    assert named["stages"]["items"]["total"] == 2
    table = hpctk("status")
    assert (table.code, len(table.out.splitlines())) == (0, 3)
    assert [one["run"] for one in hpctk("status", "--json").json] == ["runs/only", "runs/second"]
    for words in (["gather"], ["work"], ["logs"], ["status", "--watch"]):
        ended = hpctk(*words)
        assert (ended.code, ended.out) == (1, "")
        assert "error: no run is named, and ./runs contains: runs/only, runs/second" in ended.err
        assert "set HPCTK_RUN" in ended.err


BUG = """
from hpc_toolkit.run import Run
def broken(*_, **__):
    return [][1]
Run.status = broken
"""
WORKER_BUG = """
from hpc_toolkit.queue.assignment import Picker
def broken(self, loaded, **_):
    return [][1]
Picker.fresh = broken
"""


@pytest.mark.parametrize(("words", "bug"), [(["status"], BUG), (["work"], WORKER_BUG)])
def test_bug_of_ours_exits_with_70_and_a_traceback(
    hpctk: Hpctk, words: list[str], bug: str
) -> None:
    hpctk.make([{}])

    ended = hpctk(*words, "run", first=bug)

    assert (ended.code, ended.out) == (70, "")
    assert "IndexError: list index out of range" in ended.err
    assert "this is a bug in hpctk" in ended.err


def test_output_into_a_pipe_that_closes_is_no_bug(hpctk: Hpctk) -> None:
    hpctk.make_sleeping(1000, 0.0)  # more rows than a pipe holds
    assert hpctk("work", "run", "--workers", 2).code == 0

    piped = subprocess.run(
        ["bash", "-c", '"$0" -m hpc_toolkit gather run | head -n 1', sys.executable],
        env=hpctk.environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    assert len(piped.stdout.splitlines()) == 1
    assert piped.stderr == ""


def test_status_writes_nothing_and_warns_of_nothing_while_workers_write(hpctk: Hpctk) -> None:
    """Invariant I7."""
    run = hpctk.make([{} for _ in range(8_000)], NOOP)
    work = hpctk.start("work", "run", "--workers", 2)
    seen = []

    while work.process.poll() is None:
        now = Run.open("run").status()
        seen.append(now.stages["items"])
        assert now.warnings == []
        assert now.stages["items"].total == 8_000

    assert work.ended().code == 0
    done = [counts.done for counts in seen]
    assert done == sorted(done)
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in run.root.rglob("*"))
    assert hpctk("status", "run").code == 0
    assert sorted((str(p), p.lstat().st_mtime_ns) for p in run.root.rglob("*")) == before


@pytest.mark.parametrize("name", ODD_NAMES)
def test_run_directory_of_an_odd_name_works(hpctk: Hpctk, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    made = hpctk("init", path, "--items", "-", "--command", "echo {id}", stdin='{"id": 1}')

    assert (made.code, made.out) == (0, f"{path}\n")
    assert hpctk("work", path).code == 0
    assert hpctk("status", path, "--json").json["complete"]
    assert hpctk("status", env={"HPCTK_RUN": str(path)}).code == 0
    assert len(hpctk("gather", path).out.splitlines()) == 1
    assert not (tmp_path / "pwned").exists()
