"""Shell commands as workloads: values are words and never code, and the last line is the value."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.errors import WorkloadError
from tests.integration.realrun import Hpctk, journal_lines, rows_by_id, wait_until

if TYPE_CHECKING:
    from pathlib import Path

# Prints its arguments as a JSON object.
ARGV = (
    shlex.quote(sys.executable).replace("{", "{{").replace("}", "}}") + " -c "
    """'import json, sys; print(json.dumps(dict(argv=sys.argv[1:])))'"""
)
VALUES = [
    "a b",
    "it's",
    'say "hi"',
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "&& touch canary #",
    "a\ntouch canary\n",
    "$HOME ${HOME} ~ * ?",
    "\\",
    "--help",
    "",
    "ü → 漢",
    "{other}",
]


def test_value_of_a_placeholder_is_one_word_and_never_code(hpctk: Hpctk, tmp_path: Path) -> None:
    items = [{"value": value} for value in VALUES]
    run = hpctk.make(items, None, command=f"{ARGV} {{value}} --out=/tmp/{{value}}.txt")

    assert hpctk("work", "run").code == 0

    rows = rows_by_id(run)
    assert [rows[number]["value"] for number in rows] == [
        {"argv": [value, f"--out=/tmp/{value}.txt"]} for value in VALUES
    ]
    assert not (tmp_path / "canary").exists()


def test_value_that_is_no_text_is_one_word_of_json(hpctk: Hpctk) -> None:
    values = [1, 0.5, True, None, [1, "a b"], {"k": "v w"}]
    run = hpctk.make([{"value": value} for value in values], None, command=f"{ARGV} {{value}}")

    assert hpctk("work", "run").code == 0

    words = [row["value"]["argv"][0] for row in rows_by_id(run).values()]
    assert [json.loads(word) for word in words] == values


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
def test_placeholder_outside_of_quotes_is_taken(hpctk: Hpctk, command: str) -> None:
    run = hpctk.make([{"value": "$(touch canary)"}], None, command=command)

    assert hpctk("work", "run").code == 0

    assert not (hpctk.cwd / "canary").exists()
    assert rows_by_id(run)[0]["state"] == "done"


def test_command_may_use_braces_of_the_shell(hpctk: Hpctk) -> None:
    run = hpctk.make([{"n": 3}], None, command="x={n}; echo '{{\"twice\": '$((x * 2))'}}'")

    assert hpctk("work", "run").code == 0

    assert rows_by_id(run)[0]["value"] == {"twice": 6}


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("echo start; echo '{{\"a\": 1}}'", {"a": 1}),
        ("echo '{{\"a\": 1}}'; echo end", {"exit_code": 0}),
        ("echo '[1]'", {"exit_code": 0}),
        ("printf '{{\"a\": 1}}\\n\\n'", {"a": 1}),
    ],
)
def test_value_of_a_command_is_its_last_line_if_that_is_an_object(
    hpctk: Hpctk, command: str, value: dict[str, int]
) -> None:
    run = hpctk.make([{}], None, command=command)

    assert hpctk("work", "run").code == 0

    assert rows_by_id(run)[0]["value"] == value


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
        ("echo '{{\"a\": NaN}}'", "value.a is nan"),
    ],
)
def test_command_that_fails_says_how_and_what_it_printed_last(
    hpctk: Hpctk, command: str, error: str
) -> None:
    run = hpctk.make([{}], None, command=command, max_attempts=1)

    assert hpctk("work", "run").code == 0

    assert error in rows_by_id(run)[0]["error"]
    assert not journal_lines(run, "death")


def test_command_ends_when_its_shell_does_and_not_its_background_children(hpctk: Hpctk) -> None:
    run = hpctk.make([{}], None, command="sleep 3600 & echo '{{\"ok\": 1}}'")

    assert hpctk("work", "run").code == 0

    assert rows_by_id(run)[0]["value"] == {"ok": 1}


def test_command_reads_its_whole_item_from_the_environment(hpctk: Hpctk) -> None:
    run = hpctk.make([{"a b": [1]}], None, command='echo "$HPCTK_ITEM"')

    assert hpctk("work", "run").code == 0

    row = rows_by_id(run)[0]
    assert row["value"] == row["item"]


def test_command_does_not_read_the_workers_input(hpctk: Hpctk) -> None:
    run = hpctk.make([{}], None, command="cat; echo '{{\"read\": true}}'")

    assert hpctk("work", "run", stdin="secret").code == 0

    assert rows_by_id(run)[0]["value"] == {"read": True}


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
