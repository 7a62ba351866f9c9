"""What users get wrong: where it is wrong, what value, and how to fix it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk
from tests.unit.jobcommands import refused

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


def assert_refuses(words: list[str], message: str, hint: str, stdin: str = "") -> None:
    """The same of a command that is called in this process."""
    error = refused(*words, input=stdin)
    assert re.search(message, error.message), error
    assert error.exit_code == 1
    assert hint in error.hint


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


def test_strict_code_refuses_a_workload_that_changed(hpctk: Hpctk, tmp_path: Path) -> None:
    code = tmp_path / "changing.py"
    code.write_text("def work(item):\n    return {}\n")
    assert init(hpctk, "--workload", "changing:work").code == 0
    code.write_text("def work(item):\n    return {'new': True}\n")

    assert_refused(hpctk("work", "run", "--strict-code"), "changing:work, changed since init")
    assert Run.open("run").status().stages["items"].pending == 1


ONE = '{"a": 1}\n'


@pytest.mark.parametrize(
    ("words", "items", "message", "hint"),
    [
        ([], '{"id": 1}\n\n\nnope\n', "stdin, line 4, column 1: not JSON: Expecting value", ""),
        ([], "[1, 2]\n", "stdin, line 1: not a JSON object but list", ""),
        ([], '{"a": 1, "b": 2}\n{"b": 2, "a": 1}\n', "item 1 is a duplicate", ""),
        ([], "[" * 100_000 + "\n", "stdin, line 1: not JSON", ""),
        (
            ["--group-by", "step"],
            '{"step": 1}\n{"stpe": 2}\n',
            "item 1 has no key 'step', which",
            "did you mean 'stpe'?",
        ),
        (["--max-attempts", "0"], ONE, "max_attempts must be at least 1, got 0", ""),
        (["--timeout", "-1"], ONE, "--timeout: '-1' is not a duration", ""),
        (["--option", "x"], ONE, "--option 'x' is not KEY=JSON", ""),
        (
            ["--option", "x=1", "--option", "x=2"],
            ONE,
            "--option 'x=2' is not KEY=JSON, each KEY once",
            "",
        ),
        *(
            (["--option", f"x={text}"], ONE, f"--option 'x={text}' is not JSON: ", "true, false")
            for text in ("False", "NaN", "[1,", "[NaN]", '{"a": 1, "a": 2}')
        ),
        (["--option", "x=1e999"], ONE, "options: 'x' is inf", "use what JSON has"),
        (["--needs", "gpus=1,gpus=2"], ONE, "'gpus=1,gpus=2' is not NAME=VALUE,..., each once", ""),
        (["--command", "true"], ONE, "either a workload or a command", ""),
    ],
)
@pytest.mark.usefixtures("hpctk")
def test_items_and_options_of_init_that_cannot_work_are_refused(
    tmp_path: Path, words: list[str], items: str, message: str, hint: str
) -> None:
    given = ["init", "run", "--items", "-", "--workload", NOOP, *words]

    assert_refuses(given, re.escape(message), hint, items)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["init", "run", "--workload", NOOP],
        ["map", NOOP, "--run", "run"],
        ["add", "open"],
    ],
)
@pytest.mark.usefixtures("hpctk")
def test_an_item_that_is_refused_is_named_with_its_line(tmp_path: Path, words: list[str]) -> None:
    Run.create("open", workload=NOOP, open_end=True)
    (tmp_path / "l.jsonl").write_text('{"x": 1}\n\n{"x": 1e999}\n')

    message = "l.jsonl, line 3: item 1 is not plain JSON: 'x' is inf"
    assert_refuses([*words, "--items", "l.jsonl"], message, "finite numbers")


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        ("echo {b}", "item 0 has no key 'b', which the command", ""),
        ("echo {}", r"\{\} is not a plain \{key\} placeholder", "{{"),
        ("echo {0.a}", "is not a plain", "{{"),
        ("echo {a", "expected '}' before end of string", "{{"),
        ("awk '{print $1}'", "is not a plain|stands", "{{"),
    ],
)
@pytest.mark.usefixtures("hpctk")
def test_placeholder_that_is_not_plain_or_of_no_key_is_refused(
    command: str, message: str, hint: str
) -> None:
    assert_refuses(["init", "run", "--items", "-", "--command", command], message, hint, ONE)


def test_added_items_need_the_keys_of_the_command(hpctk: Hpctk) -> None:
    assert init(hpctk, "--command", "echo {seed}", "--open", items='{"seed": 1}\n').code == 0

    added = hpctk("add", "run", "--items", "-", stdin='{"seed": 2}\n{"sed": 3}\n')

    assert_refused(added, "item 1 has no key 'seed', which the command", hint="mean 'sed'?")


CANARY = "from pathlib import Path\nPath('canary').touch()\ndef work(item):\n    return {}\n"


@pytest.mark.parametrize(
    ("words", "target"),
    [(["work"], ""), (["work"], "run.json"), (["try"], ""), (["add", "--items", "-"], "")],
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


def test_read_only_run_can_be_read_and_says_so_where_it_must_be_written(
    hpctk: Hpctk, small_disk: Path
) -> None:
    run = hpctk.make([{}, {"how": "memory"}], name=str(small_disk / "run"), max_attempts=1)
    assert hpctk("work", run.root).code == 0
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    assert hpctk("status", run.root, "--json").json["complete"]
    assert len(hpctk("gather", run.root).out.splitlines()) == 2
    assert hpctk("explain", run.root, "--item", "1").code == 0
    assert hpctk("logs", run.root).code == 0
    assert_refused(hpctk("work", run.root), "Read-only file system", hint="permissions")
    assert_refused(hpctk("retry", run.root), "Read-only file system", hint="permissions")
    made = hpctk("init", small_disk / "new", "--items", "-", "--workload", NOOP, stdin='{"id": 1}')
    assert_refused(made, "cannot make .*: Read-only file system", hint="permissions")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["status", "rum"], "rum is not a run: it has no run.json", "did you mean 'run'?"),
        (["work", "trace"], "trace is not a run: it has no run.json", ""),
        (["add", "items.jsonl", "--seal"], "items.jsonl is a file, not a run", "name the run's"),
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
        (["doctor", "nothing"], "is not a directory", "name a run"),
        (["gather", "run", "-o", "x.xls"], "x.xls: unknown format '.xls'", ""),
        (["gather", "run", "-o", "gone/x.csv", "--partial"], "cannot write gone/x.csv", ""),
        (["gather", "run", "--stage", "item"], "has no stage 'item'", "'items'"),
        (["work", "run", "--workers", "0"], "workers must be 1 to 1024, got 0", ""),
        (["work", "run", "--deadline", "@nan"], "deadline 'nan' is not a time", ""),
        (["work", "run", "--idle-exit", "nan"], "--idle-exit: 'nan' is not a duration", ""),
        (["work", "run", "--lease", "0"], "--lease: '0' is zero", ""),
    ],
)
def test_request_for_what_is_not_there_or_absurd_is_refused(
    hpctk: Hpctk, tmp_path: Path, words: list[str], message: str, hint: str
) -> None:
    run = hpctk.make([{}, {}])
    for name in ("items.jsonl", "search.toml"):
        (tmp_path / name).touch()
    (tmp_path / "more.jsonl").write_text('{"id": 2}')

    if words[0] in ("work", "status"):  # which read their words in two ways
        assert_refused(hpctk(*words), re.escape(message), hint=hint)
    else:
        assert_refuses(words, re.escape(message), hint)
    assert not list(run.paths.workers.iterdir())


@pytest.mark.parametrize(
    "words", [["status", "--nope"], ["nope"], ["work", "run", "--workers", "x"]]
)
def test_wrong_usage_exits_with_2(hpctk: Hpctk, words: list[str]) -> None:
    ended = hpctk(*words)

    assert (ended.code, ended.out) == (2, "")
    assert "Usage:" in ended.err
