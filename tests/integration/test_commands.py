"""Shell commands as workloads: values are words and never code, and the last line is the value."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from hpc_toolkit.errors import PermanentError, WorkloadError
from hpc_toolkit.run import Run
from hpc_toolkit.worker.command import CommandWorkload
from tests.integration.realrun import Hpctk, rows_by_id, wait_until

# Prints its arguments as a JSON object.
ARGV = (
    shlex.quote(sys.executable).replace("{", "{{").replace("}", "}}") + " -c "
    """'import json, sys; print(json.dumps(dict(argv=sys.argv[1:])))'"""
)
VALUES = [
    *("a b", "it's", 'say "hi"', "\\", "--help", "", "ü → 漢", "{other}", "$HOME ${HOME} ~ * ?"),
    *("$(touch canary)", "`touch canary`", "; touch canary", "&& touch canary #"),
    "a\ntouch canary\n",
]


def test_value_of_a_placeholder_is_one_word_and_never_code(hpctk: Hpctk, tmp_path: Path) -> None:
    others = [1, 0.5, True, None, [1, "a b"], {"k": "v w"}]  # as JSON
    items = [{"value": value} for value in [*VALUES, *others]]
    run = hpctk.worked(items, None, command=f"{ARGV} {{value}} --out=/tmp/{{value}}.txt")

    words = [row["value"]["argv"] for row in rows_by_id(run).values()]
    assert words[: len(VALUES)] == [[value, f"--out=/tmp/{value}.txt"] for value in VALUES]
    assert [json.loads(value) for value, _ in words[len(VALUES) :]] == others
    assert not (tmp_path / "canary").exists()


def test_a_placeholder_names_a_key_as_it_is_and_then_its_parts(hpctk: Hpctk) -> None:
    item = {"model.lr": 1, "batch-size": 2, "model": {"lr": 3, "drop-out": 4}}
    command = f"{ARGV} {{model.lr}} --batch-size {{batch-size}} {{model.drop-out}}"
    run = hpctk.worked(
        [item, {"batch-size": 2, "model": {"lr": 3, "drop-out": 4}}], None, command=command
    )

    words = [row["value"]["argv"] for row in rows_by_id(run).values()]
    assert words == [["1", "--batch-size", "2", "4"], ["3", "--batch-size", "2", "4"]]


def test_value_with_args_is_split_like_a_shell_and_never_code(hpctk: Hpctk) -> None:
    words: dict[str, list[str]] = {
        "--name 'a b'  \"c $HOME\" d\\ e": ["--name", "a b", "c $HOME", "d e"],
        "$(touch canary) `touch canary` ; touch canary & * ~": [
            *("$(touch", "canary)", "`touch", "canary`", ";", "touch", "canary", "&", "*", "~")
        ],
        "": [],
        "''": [""],
        "#x": ["#x"],
    }
    lists = {
        json.dumps(value): [str(one) for one in value]
        for value in (["a b", "it's", "$(touch canary)"], [1, 2.5], [])
    }
    given = [*words, *map(json.loads, lists), "it's"]
    items = [{"value": value} for value in given]
    run = hpctk.worked(items, None, command=f"{ARGV} {{value:args}} end", max_attempts=3)

    *good, bad = rows_by_id(run).values()
    expected = [*words.values(), *lists.values()]
    assert [row["value"]["argv"] for row in good] == [[*found, "end"] for found in expected]
    assert "cannot be split into words: No closing quotation" in bad["error"]
    assert bad["attempts"] == 1
    assert not (hpctk.cwd / "canary").exists()


@pytest.mark.parametrize(
    "command",
    [
        'echo "{value}"',
        "echo '{value}'",
        "bash -c 'echo {value}'",
        'echo "$(echo {value})"',
        "echo `echo {value}`",
        "echo $(( {value} ))",
        "true # {value}",
        "cat <<END\n{value}\nEND",
        r"""echo \\"{value}" """,
        r"echo \{value}",
        "echo ${value}",
    ],
)
def test_placeholder_where_quotes_do_not_hold_is_refused(hpctk: Hpctk, command: str) -> None:
    with pytest.raises(WorkloadError, match=r"\{value\} stands (inside|behind)"):
        hpctk.make([{"value": "$(touch canary)"}], None, command=command)


@pytest.mark.parametrize(
    "command",
    [
        "echo \"text\" {value} 'text'",
        "echo $(echo {value})",
        r"echo \" {value}",
        "echo a#b {value}",
        "echo {value}# {value}",
        "true # it's fine\necho {value}",
    ],
)
def test_placeholder_outside_of_quotes_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)

    (value,) = CommandWorkload(command).run(None, iter([{"value": "$(touch canary)"}]))

    assert value == {"exit_code": 0}
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("echo some words; exit 3", "exit code 3; its output ends with: some words"),
        ("exit 4", "exit code 4; no output"),
        ("kill -SEGV $$", "killed by SIGSEGV; no output"),
        ("no-such-program-anywhere", "its stderr ends with: /bin/bash: line 1: no-such-program"),
        ("echo out; echo why >&2; exit 3", "exit code 3; its stderr ends with: why"),
        (
            "printf 'Traceback\\n  line 7\\nValueError: bad\\n' >&2; exit 1",
            "exit code 1; its stderr ends with: ValueError: bad\nlast lines of stderr:\nTrace",
        ),
    ],
)
def test_command_that_fails_says_how_and_what_it_printed_last(command: str, error: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(error)):
        list(CommandWorkload(command).run(None, iter([{}])))


def test_output_of_a_command_is_seen_while_it_runs(hpctk: Hpctk, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    run = hpctk.make(
        [{"gate": str(gate)}],
        None,
        command="echo early; while ! test -e {gate}; do sleep 0.02; done",
    )
    work = hpctk.start("work", "run")

    wait_until(lambda: "early" in hpctk("logs", "run").out, "the output")

    gate.touch()
    assert work.ended().code == 0
    assert run.status().complete


MIB = 1 << 20


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("echo start; echo '{{\"a\": 1}}'", {"a": 1}),
        ("echo '{{\"a\": 1}}'; echo end", {"exit_code": 0}),
        ("echo '[1]'", {"exit_code": 0}),
        ("printf '{{\"a\": 1}}\\n\\n'", {"a": 1}),
        (f'echo noise; printf \'{{{{"a": "%{3 * MIB}s"}}}}\\n\' x', {"a": f"{'x':>{3 * MIB}}"}),
        (f"head -c {3 * MIB} /dev/zero | tr '\\0' '\\n'; echo '{{{{\"a\": 1}}}}'", {"a": 1}),
        (f"echo '{{{{\"a\": 1}}}}'; head -c {3 * MIB} /dev/zero | tr '\\0' '\\n'", {"a": 1}),
        (f"echo '{{{{\"a\": 1}}}}'; head -c {3 * MIB} /dev/zero; echo", {"exit_code": 0}),
        ("printf ' 50%%\\r100%%\\r{{\"a\": 1}}'", {"a": 1}),
        ("printf '100%%\\r{{\"a\": 1}}\\r\\n\\r\\n'", {"a": 1}),
        ("printf '\\xef\\xbb\\xbf{{\"a\": 1}}\\n'", {"a": 1}),
        ("printf '{{\"a\": 1}}\\r100%%\\r'", {"exit_code": 0}),
        ("printf '\\xff\\n'", {"exit_code": 0}),
    ],
)
def test_value_of_a_command_is_its_last_line_if_that_is_an_object_however_long(
    command: str, value: dict[str, object]
) -> None:
    assert list(CommandWorkload(command).run(None, iter([{}]))) == [value]


def test_command_ends_when_its_shell_does(hpctk: Hpctk) -> None:
    run = hpctk.worked([{}], None, command="sleep 3600 & echo '{{\"ok\": 1}}'")

    assert rows_by_id(run)[0]["value"] == {"ok": 1}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (r'{"a": "\xff"}', "'utf-8' codec can't decode byte 0xff in position 7"),
        ("{'a': 1}", "Expecting property name enclosed in double quotes"),
        ('{"a": 1} and more', "Extra data"),
        ('{"a": 1, "b": {"c": 2, "c": 3}}', "it has the key 'c' 2 times"),
        ('{"a": ' + 5000 * "1" + "}", "Exceeds the limit (4300 digits)"),
        ('{"a": ' + 99999 * "[" + "}", "recursion"),
    ],
)
def test_last_line_that_begins_as_an_object_and_cannot_be_read_is_reported(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], line: str, reason: str
) -> None:
    (tmp_path / "line").write_text(line)

    (value,) = CommandWorkload(f'printf "$(cat {tmp_path}/line)"').run(None, iter([{}]))

    assert value["exit_code"] == 0
    assert reason in value["unread_line"]
    said = f"not read as a result: {value['unread_line']}\n"
    assert capsysbinary.readouterr().err.endswith(said.encode())


def test_line_of_more_than_64_mib_is_reported_and_not_kept() -> None:
    workload = CommandWorkload("printf '{{\"a\": \"'; head -c 68000000 /dev/zero; echo '\"}}'")

    (value,) = workload.run(None, iter([{}]))

    assert value == {"exit_code": 0, "unread_line": "it is over 67,108,864 bytes long"}


# With "HPCTK_ITEM=", an "=" and a NUL byte, this is the longest variable that Linux takes.
LONGEST = (128 << 10) - 1 - len('HPCTK_ITEM={"v": ""}')


@pytest.mark.parametrize(("length", "there"), [(LONGEST, True), (LONGEST + 1, False), (MIB, False)])
def test_item_of_any_length_is_in_a_file_and_in_the_environment_if_it_fits(
    length: int, there: bool
) -> None:
    script = (
        "import json, os; item = json.load(open(os.environ['HPCTK_ITEM_FILE'])); "
        "print(json.dumps({'length': len(item['v']), 'there': 'HPCTK_ITEM' in os.environ, "
        "'same': os.environ.get('HPCTK_ITEM', json.dumps(item)) == json.dumps(item)}))"
    )
    quoted = shlex.quote(script).replace("{", "{{").replace("}", "}}")

    (value,) = CommandWorkload(f"{sys.executable} -c {quoted}").run(
        None, iter([{"v": length * "x"}])
    )

    assert value == {"length": length, "there": there, "same": True}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (200_000 * "x", "with the value of 'v' the command is over 131,071 bytes long"),
        (list(range(50_000)), "with the value of 'v' the command is over 131,071 bytes long"),
        ("a\0b", r"the value of 'v' has a character that no command can take: 'a\x00b'"),
        ("a\ud800b", r"the value of 'v' has a character that no command can take: 'a\ud800b'"),
    ],
)
def test_value_that_no_command_can_take_fails_the_item_at_once_with_its_key(
    value: object, message: str
) -> None:
    with pytest.raises(PermanentError) as failed:
        list(CommandWorkload("echo {id} {v}").run(None, iter([{"id": 0, "v": value}])))

    assert failed.value.message == message
    assert failed.value.hint == "read the item from the JSON file $HPCTK_ITEM_FILE"


def test_byte_that_is_not_utf_8_reaches_the_command_as_it_was_given() -> None:
    item = {"v": os.fsdecode(b"a\xff")}

    (value,) = CommandWorkload("test {v} = $'a\\xff'").run(None, iter([item]))

    assert value == {"exit_code": 0}


def test_pipefail_fails_a_command_whose_pipe_has_a_program_that_failed(hpctk: Hpctk) -> None:
    command = "exit 3 | cat >&2 | true"
    for name, words in (("run", ()), ("strict", ("--pipefail",))):
        made = hpctk("init", name, "--command", command, "--count", 1, "--max-attempts", 1, *words)
        assert made.code == 0
        assert hpctk("work", name).code == 0

    states = [Run.open(name).results()[0]["state"] for name in ("run", "strict")]
    assert states == ["done", "failed"]
    assert hpctk("try", "run").code == 0
    assert hpctk("try", "strict").code == 1


STEP = {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("env", "expected"), [({}, ""), (STEP, "1"), ({**STEP, "SLURM_OVERLAP": "0"}, "0")]
)
def test_items_in_a_step_may_start_steps_beside_it(
    hpctk: Hpctk, env: dict[str, str], expected: str
) -> None:
    run = hpctk.make([{}], None, command='echo "{{\\"overlap\\": \\"$SLURM_OVERLAP\\"}}"')

    assert hpctk("work", "run", env=env).code == 0

    assert rows_by_id(run)[0]["value"] == {"overlap": expected}
