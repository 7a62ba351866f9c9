"""What users get wrong: where it is wrong, what value, and how to fix it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk, rows_by_id

if TYPE_CHECKING:
    from collections.abc import Iterator

NOOP = "hpc_toolkit.science.workloads.synthetic:Noop"


def assert_refused(ended: Any, message: str, *, hint: str = "") -> None:
    """An error of the user's: one line that says what, at most one that says how to fix it."""
    assert ended.code == 1, ended
    assert ended.out == ""
    lines = [line for line in ended.err.splitlines() if not line.startswith("warning: ")]
    assert re.search(message, lines[0]), ended.err
    assert lines[0].startswith("error: ")
    assert len(lines) <= 2
    assert hint in "".join(lines[1:])


def init(hpctk: Hpctk, *words: object, items: str = '{"id": 1}\n') -> Any:
    return hpctk("init", "run", "--items", "-", *words, stdin=items)


@pytest.mark.parametrize(
    ("workload", "message", "hint"),
    [
        ("nowhere:work", "no module named 'nowhere'", "looked in "),
        ("brok:work", "no module named 'brok'", "did you mean 'broken'?"),
        ("./src/broken.py:work", "names a file", "name it as import does: 'src.broken:work'"),
        ("json:load_", "module 'json' has no 'load_'", "did you mean 'loads?'"),
        ("json:a.b", "is not MODULE:NAME", "such as hpc_toolkit"),
        ("broken:work", "cannot be imported: ZeroDivisionError: division by zero", "import broken"),
        ("needy:work", "cannot be imported: No module named 'gone'", "install what provides"),
        ("broken_syntax:work", "cannot be imported: SyntaxError", "import broken_syntax"),
        ("string:digits", "is neither a function nor a class but str", ""),
        ("json:JSONDecoder", r"has no methods load\(group\) and run\(context, items\)", ""),
    ],
)
def test_init_with_a_workload_that_is_not_there_says_what_is_wrong(
    hpctk: Hpctk, tmp_path: Path, workload: str, message: str, hint: str
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "needy.py").write_text("import gone\n")
    (tmp_path / "broken_syntax.py").write_text("def work(:\n")

    ended = init(hpctk, "--workload", workload)

    assert_refused(ended, message)
    assert re.search(hint, ended.err)
    assert not (tmp_path / "run").exists()


def test_work_with_a_workload_that_broke_since_init_says_so_and_fails_no_item(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    code = tmp_path / "later.py"
    code.write_text("def work(item):\n    return {}\n")
    assert init(hpctk, "--workload", "later:work").code == 0
    code.write_text(f"raise RuntimeError({'long ' * 3000!r})\n")

    ended = hpctk("work", "run", "--workers", 2)

    assert_refused(ended, "workload 'later:work' cannot be imported: RuntimeError: long long")
    assert "warning: the code of stage 'items', later:work, changed since init" in ended.err
    code.write_text("def work(item):\n    return {}\n")
    assert hpctk("work", "run", "--strict-code").code == 0
    assert rows_by_id(Run.open("run"))[1]["attempts"] == 1


def test_strict_code_refuses_a_workload_that_changed(hpctk: Hpctk, tmp_path: Path) -> None:
    code = tmp_path / "changing.py"
    code.write_text("def work(item):\n    return {}\n")
    assert init(hpctk, "--workload", "changing:work").code == 0
    code.write_text("def work(item):\n    return {'new': True}\n")

    assert_refused(hpctk("work", "run", "--strict-code"), "changing:work, changed since init")
    assert Run.open("run").status().stages["items"].pending == 1


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ('{"id": 1}\n\n\nnope\n', "stdin, line 4, column 1: not JSON: Expecting value"),
        ("[1, 2]\n", "stdin, line 1: not a JSON object but list"),
        ('{"a": 1, "b": 2}\n{"b": 2, "a": 1}\n', "item 1 is a duplicate"),
        ("\n  \n", "the list of items is empty"),
        ("[" * 100_000 + "\n", "stdin, line 1: not JSON"),
    ],
)
def test_items_that_are_no_list_of_objects_are_refused(
    hpctk: Hpctk, tmp_path: Path, items: str, message: str
) -> None:
    ended = init(hpctk, "--workload", NOOP, items=items)

    assert_refused(ended, message.replace("{", r"\{"))
    assert not (tmp_path / "run").exists()


def test_group_key_that_an_item_lacks_is_refused_with_the_near_miss(hpctk: Hpctk) -> None:
    items = '{"checkpoint": 1}\n{"checkpiont": 2}\n'

    ended = init(hpctk, "--workload", NOOP, "--group-by", "checkpoint", items=items)

    assert_refused(
        ended, "item 1 has no key 'checkpoint', which", hint="did you mean 'checkpiont'?"
    )


def test_placeholder_that_an_item_lacks_is_refused_with_the_near_miss(hpctk: Hpctk) -> None:
    ended = init(hpctk, "--command", "echo {sede}", items='{"seed": 1}\n')
    assert_refused(ended, "item 0 has no key 'sede', which the command", hint="mean 'seed'?")

    made = init(hpctk, "--command", "echo {seed}", "--open", items='{"seed": 1}\n')
    assert made.code == 0
    added = hpctk("add", "run", "--items", "-", stdin='{"seed": 2}\n{"sed": 3}\n')
    assert_refused(added, "item 1 has no key 'seed', which the command needs")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo {}", r"\{\} is not a plain \{key\} placeholder"),
        ("echo {0.a}", "is not a plain"),
        ("echo {a", "expected '}' before end of string"),
        ("awk '{print $1}'", "is not a plain|stands"),
    ],
)
def test_placeholder_that_is_not_plain_is_refused(hpctk: Hpctk, command: str, message: str) -> None:
    ended = init(hpctk, "--command", command, items='{"a": 1}\n')

    assert_refused(ended, message, hint="{{")


def test_init_of_an_existing_directory_is_refused(hpctk: Hpctk, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()

    assert_refused(init(hpctk, "--workload", NOOP), "run exists", hint="continue it with")

    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("words", [[], ["--workload", NOOP, "--command", "true"]])
def test_init_with_no_code_or_two_is_refused(hpctk: Hpctk, words: list[str]) -> None:
    assert_refused(init(hpctk, *words), "either a workload or a command", hint="--workload")


@pytest.mark.parametrize("command", ["work", "status", "add"])
def test_path_that_is_no_run_is_refused(hpctk: Hpctk, command: str) -> None:
    words = ("--seal",) if command == "add" else ()
    assert_refused(hpctk(command, "here", *words), r"here is not a run: it has no run\.json")

    Path("here").touch()
    ended = hpctk(command, "here", *words)
    assert_refused(ended, r"here is a file, not a run", hint="name the run's directory")


def change_manifest(run: Run, **changes: Any) -> None:
    record = json.loads(run.paths.manifest.read_text())
    run.paths.manifest.write_text(json.dumps({**record, **changes}))


def test_run_of_a_newer_format_is_refused(hpctk: Hpctk) -> None:
    change_manifest(hpctk.make([{}]), format=2)

    ended = hpctk("status", "run")

    assert_refused(
        ended, r"run/run\.json: format 2; this hpctk reads formats up to 1", hint="upgrade"
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}'])
def test_damaged_manifest_is_refused(hpctk: Hpctk, text: str) -> None:
    hpctk.make([{}]).paths.manifest.write_text(text)

    assert_refused(hpctk("status", "run"), r"run\.json is damaged", hint="backup")


CANARY = "from pathlib import Path\nPath('canary').touch()\ndef work(item):\n    return {}\n"


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (["work"], ""),
        (["work"], "run.json"),
        (["try"], ""),
        (["add", "--items", "-"], ""),
    ],
)
def test_run_that_everybody_can_write_is_refused_before_its_code_runs(
    hpctk: Hpctk, tmp_path: Path, words: list[str], target: str
) -> None:
    (tmp_path / "code.py").write_text(CANARY)
    assert init(hpctk, "--workload", "code:work", "--open").code == 0
    (tmp_path / "canary").unlink()
    path = Path("run", target)
    path.chmod(path.stat().st_mode | 0o002)

    ended = hpctk(words[0], "run", *words[1:], stdin='{"id": 2}')

    assert_refused(ended, "is world-writable, and its code", hint="chmod o-w")
    assert not (tmp_path / "canary").exists()


def test_run_that_everybody_can_write_may_be_read(hpctk: Hpctk) -> None:
    hpctk.make([{}]).root.chmod(0o777)

    assert hpctk("status", "run").code == 0
    assert hpctk("gather", "run", "--partial").code == 0


def test_run_that_its_group_can_write_is_accepted_and_named_once(hpctk: Hpctk) -> None:
    hpctk.make([{}]).root.chmod(0o775)

    ended = hpctk("work", "run", "--workers", 2)

    assert ended.code == 0
    assert ended.err.count("warning: run is writable by its group") == 1


def test_run_of_another_user_is_refused(hpctk: Hpctk) -> None:
    if os.getuid() != 0:
        pytest.skip("giving a directory away needs root")
    run = hpctk.make([{}])
    os.chown(run.root, 12345, -1)

    assert_refused(hpctk("work", "run"), "belongs to user 12345", hint="create your own run")


def test_run_made_with_an_open_umask_is_not_refused(hpctk: Hpctk) -> None:
    made = hpctk("init", "run", "--items", "-", "--workload", NOOP, stdin='{"id": 1}', umask=0)
    assert made.code == 0

    assert hpctk("work", "run").code == 0


def test_files_of_a_run_keep_the_groups_permissions_under_every_umask(hpctk: Hpctk) -> None:
    lines = '{"id": 1}\n{"id": 2}\n'
    words = ("init", "run", "--open", "--items", "-", "--workload", NOOP)
    assert hpctk(*words, stdin=lines, umask=0o002).code == 0
    more = ("add", "run", "--items", "-", "--seal")
    assert hpctk(*more, stdin='{"id": 3}', umask=0o077).code == 0
    assert hpctk("work", "run", "--workers", 2, umask=0o077).code == 0
    assert hpctk("gather", "run", "-o", "rows.csv", umask=0o077).code == 0
    assert hpctk("report", "run", umask=0o077).code == 0

    made = [path for path in (hpctk.cwd / "run").rglob("*") if not path.is_symlink()]
    assert len([path for path in made if path.parent.name in ("journals", "workers")]) > 2
    wanted = {path: 0o070 if path.is_dir() else 0o060 for path in made}
    assert [path for path, bits in wanted.items() if bits & ~path.stat().st_mode] == []
    # Elsewhere the umask decides.
    assert (hpctk.cwd / "rows.csv").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory that can be mounted read-only."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=755", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_read_only_run_can_be_read_and_says_so_where_it_must_be_written(
    hpctk: Hpctk, read_only: Path
) -> None:
    run = hpctk.make([{}, {"how": "memory"}], name=str(read_only / "run"), max_attempts=1)
    assert hpctk("work", run.root).code == 0
    subprocess.run(["mount", "-o", "remount,ro", str(read_only)], check=True)

    assert hpctk("status", run.root, "--json").json["complete"]
    assert len(hpctk("gather", run.root).out.splitlines()) == 2
    assert hpctk("explain", run.root, "--item", "1").code == 0
    assert hpctk("logs", run.root).code == 0
    assert_refused(hpctk("work", run.root), "Read-only file system", hint="permissions")
    assert_refused(hpctk("retry", run.root), "Read-only file system", hint="permissions")
    made = hpctk("init", read_only / "new", "--items", "-", "--workload", NOOP, stdin='{"id": 1}')
    assert_refused(made, "cannot make .*: Read-only file system", hint="permissions")


@pytest.mark.parametrize("name", ["journals", "workers", "logs", "stages/items/claims"])
def test_a_file_in_the_place_of_a_directory_is_named(hpctk: Hpctk, name: str) -> None:
    hpctk.make_sleeping(1, 0.0)
    shutil.rmtree(Path("run", name))
    Path("run", name).touch()

    assert_refused(hpctk("work", "run"), f"run/{name}", hint="hpctk doctor")


def test_torn_and_damaged_lines_are_skipped_and_reported(hpctk: Hpctk) -> None:
    """Invariant I8."""
    run = hpctk.make_sleeping(6, 0.0)
    assert hpctk("work", "run").code == 0
    (journal,) = run.paths.journals.iterdir()
    lines = journal.read_bytes().splitlines(keepends=True)
    damaged = lines[0].replace(b'"done"', b'"DONE"')
    journal.write_bytes(damaged + b"".join(lines[1:-1]) + lines[-1][:20])

    status = hpctk("status", "run", "--json").json

    assert status["stages"]["items"] | {"sealed": True} == {
        "total": 6,
        "pending": 1,
        "running": 0,
        "claimed": 0,
        "done": 5,
        "failed": 0,
        "retried": 0,
        "duplicates": 0,
        "sealed": True,
        "coming": 0,
    }
    assert any(
        "line at byte 0 is skipped: wrong checksum" in warning for warning in status["warnings"]
    )
    assert any("torn last line (20 bytes" in warning for warning in status["warnings"])
    assert hpctk("work", "run").code == 0
    assert {row["state"] for row in Run.open("run").results()} == {"done"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "0"], "workers must be 1 to 1024, got 0"),
        (["--workers", "1000000000"], "workers must be 1 to 1024, got 1000000000"),
        (["--deadline", "-5"], "--deadline: '-5' is not a duration"),
        (["--deadline", "@nan"], "deadline 'nan' is not a time"),
        (["--idle-exit", "nan"], "--idle-exit: 'nan' is not a duration"),
        (["--lease", "0"], "--lease: '0' is zero"),
        (["--grace", "99999999999s"], "--grace: '99999999999s' is too large"),
    ],
)
def test_work_with_an_absurd_number_is_refused(
    hpctk: Hpctk, words: list[str], message: str
) -> None:
    run = hpctk.make([{}])

    assert_refused(hpctk("work", "run", *words), re.escape(message))

    assert not list(run.paths.workers.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-attempts", "0"], "max_attempts must be at least 1, got 0"),
        (["--timeout", "-1"], "--timeout: '-1' is not a duration"),
        (["--max-failures", "-1"], "--max-failures '-1' is neither a count nor a share"),
        (["--option", "x"], "--option 'x' is not KEY=JSON"),
        (["--option", "x=1"], "is a function; options are for classes"),
    ],
)
def test_init_with_an_absurd_number_is_refused(
    hpctk: Hpctk, tmp_path: Path, words: list[str], message: str
) -> None:
    assert_refused(init(hpctk, "--workload", NOOP, *words), re.escape(message))

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["status", "rum"], "rum is not a run", "did you mean 'run'?"),
        (["status", "."], "is not a run", "it contains runs: run"),
        (["work", "rum/../run/stages"], "is not a run", "make one with 'hpctk init'"),
        (["add", "run", "--items", "tems.jsonl"], "cannot read", "did you mean 'items.jsonl'?"),
        (["map", "json:loads", "--items", "gone"], "cannot read items from gone: No such", "stdin"),
        (["add", "run", "--items", "more.jsonl"], "run is sealed", "--open"),
        (["campaign", "plan", "search.tml"], "cannot read", "did you mean 'search.toml'?"),
        (["explain", "run", "--item", "²"], "no item is or contains '²'", "(0 to 1)"),
        (["explain", "run", "--item", "trace"], "'trace' matches 2 items", "more of its JSON"),
        (["try", "run", "--item", "nope"], "no item is or contains 'nope'", "a part of its JSON"),
        (["logs", "run", "--worker", "nobody"], "no worker of run is called 'nobody'", ""),
        (["gather", "run", "-o", "x.xls"], "x.xls: unknown format '.xls'", ""),
        (["gather", "run", "-o", "gone/x.csv", "--partial"], "cannot write gone/x.csv", ""),
        (["gather", "run", "--stage", "item"], "has no stage 'item'", "'items'"),
    ],
)
def test_request_for_what_is_not_there_is_refused(
    hpctk: Hpctk, tmp_path: Path, words: list[str], message: str, hint: str
) -> None:
    hpctk.make([{}, {}])
    for name in ("items.jsonl", "search.toml"):
        (tmp_path / name).touch()
    (tmp_path / "more.jsonl").write_text('{"id": 2}')

    assert_refused(hpctk(*words), re.escape(message), hint=hint)


@pytest.mark.parametrize(
    "words", [["status", "--nope"], ["nope"], ["work", "run", "--workers", "x"]]
)
def test_wrong_usage_exits_with_2(hpctk: Hpctk, words: list[str]) -> None:
    ended = hpctk(*words)

    assert (ended.code, ended.out) == (2, "")
    assert "Usage:" in ended.err
