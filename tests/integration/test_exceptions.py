"""Exceptions, exits and broken output of the user's code: each costs its own item, at most."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit.errors import HpcToolkitError, describe
from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk, journal_lines, rows_by_id

STRANGE = {
    "Unspeakable('text')": "Unspeakable: its text cannot be read, str() raised ValueError",
    "Unspeakable('number')": "Unspeakable: its text cannot be read, str() raised TypeError",
    "Unspeakable('exit')": "Unspeakable: its text cannot be read, str() raised SystemExit",
    "Unspeakable('class')": "Unspeakable: said",
    "SyntaxError('its traceback cannot be formatted')": "SyntaxError: its traceback cannot be",
    "BareError()": "BareError",
    "PermanentError(5)": "5",
    "StopIteration(3)": "RuntimeError: generator raised StopIteration",
    "GeneratorExit()": "GeneratorExit",
    "SystemExit(0)": "SystemExit: 0",
    "ValueError('\\ud800')": "ValueError: \ud800",
    "ExceptionGroup('many', [ValueError(n) for n in range(9999)])": "ExceptionGroup: many (9999",
}


def test_exception_whose_methods_fail_is_the_error_of_its_item_and_no_death(hpctk: Hpctk) -> None:
    items = [{"error": code} for code in STRANGE]
    run = hpctk.worked(items, "sample_workloads:raise_strange", max_attempts=1)

    found = {row["item"]["error"]: row["error"] for row in rows_by_id(run).values()}
    assert not journal_lines(run, "death")
    for code, error in STRANGE.items():
        assert found[code].startswith(error), code
    traces = {line["item"]: line["traceback"] for line in journal_lines(run) if "traceback" in line}
    assert len(traces) == len(STRANGE)
    assert all(traces.values())


def test_error_of_megabytes_is_cut_with_its_length_and_complete_in_the_log(hpctk: Hpctk) -> None:
    run = hpctk.worked(
        [{"error": "ValueError('begin' + 'x' * 5_000_000 + 'end')"}],
        "sample_workloads:raise_strange",
        max_attempts=1,
    )

    error = rows_by_id(run)[0]["error"]
    assert error.startswith("ValueError: beginxxx")
    assert "\n... (5,000,020 characters) ...\n" in error
    assert error.endswith("xend")
    (line,) = journal_lines(run, "failed")
    assert len(line["error"]) + len(line["traceback"]) < 9_000
    assert "in raise_strange\n" in line["traceback"]
    assert len(hpctk("explain", "run", "--item", 0).out) < 10_000
    assert "begin" + "x" * 5_000_000 + "end" in hpctk("logs", "run", "--item", 0).out


BREAKING = [
    *("sys.stdout = None", "sys.stdout.close()", "sys.stdout.detach()", "os.close(1)"),
    *("sys.stderr = None", "sys.stderr.close()", "os.close(2)", "os.close(1); sys.stdout = None"),
]
REPLACING = "sys.stdout = type('OnlyWrites', (), {'write': lambda *_: None})()"


@pytest.mark.parametrize("code", [*BREAKING, REPLACING])
def test_output_that_an_item_breaks_is_whole_for_the_next_item(hpctk: Hpctk, code: str) -> None:
    items: list[dict[str, object]] = [{"code": code}, {}, {}]
    run = hpctk.worked(items, "sample_workloads:break_output", items_per_claim=2)

    assert [row["state"] for row in rows_by_id(run).values()] == ["done"] * 3
    assert not journal_lines(run, "death")
    for item in (1, 2) if code in BREAKING else ():
        said = sorted(hpctk("logs", "run", "--item", item).out.splitlines())
        assert said == [f"{one} of {item}" for one in ("child error", "child", "error", "out")]


IMPORTS = {
    "import sys; sys.exit()": "SystemExit",
    "import argparse; argparse.ArgumentParser().parse_args(['--no-such'])": "SystemExit: 2",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit": "GeneratorExit",
    "class E(Exception):\n    def __str__(self): raise ValueError\nraise E": "E: its text",
    "def __getattr__(name): raise OSError(name)": "OSError: work",
    "class work:\n    def __init__(self): raise SystemExit(0)": "SystemExit: 0",
    "class work:\n    load = run = print\n    prefetch = property(lambda self: 1 / 0)": "Zero",
}


@pytest.mark.parametrize("text", IMPORTS)
def test_code_that_ends_the_process_that_imports_it_is_an_error_of_every_command(
    hpctk: Hpctk, text: str
) -> None:
    Path("ending.py").write_text("def work(item): return {}\n")
    assert hpctk("init", "run", "--workload", "ending:work", "--count", 2).code == 0
    Path("ending.py").write_text(f"{text}\n")
    code = 130 if "Keyboard" in text else 1

    for words in (("init", "other", "--count", 2, "--workload", "ending:work"), ("try", "run")):
        ended = hpctk(*words)
        assert ended.code == code, ended
        assert f": {IMPORTS[text]}" in ended.err
        assert "Traceback" not in ended.err
    ended = hpctk("work", "run")
    assert ended.code == 1
    assert f": {IMPORTS[text]}" in ended.err
    run = Run.open("run")
    assert not journal_lines(run, "death")
    assert run.status().stages["items"].pending == 2
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError(), "ValueError"),
        (ValueError("x" * 3988), "ValueError: " + "x" * 3988),
        (HpcToolkitError("bad", hint="do"), "HpcToolkitError: bad"),
    ],
)
def test_describe_keeps_texts_of_up_to_4000_characters(error: Exception, text: str) -> None:
    assert describe(error) == text
    assert len(describe(ValueError("x" * 3989))) < 4_100


@pytest.mark.parametrize(
    ("no_retry", "attempts"),
    [("ValueError", 1), ("LookupError, KeyError", 3), ("ArithmeticError,Exception", 1)],
)
def test_item_that_raises_an_exception_without_retry_fails_at_once(
    hpctk: Hpctk, no_retry: str, attempts: int
) -> None:
    items = [{"error": "SyntaxError('x')"}, {"error": "UnicodeError('x')"}]
    run = hpctk.worked(items, "sample_workloads:raise_strange", no_retry=no_retry)

    rows = rows_by_id(run)
    assert rows[1]["attempts"] == attempts
    assert rows[0]["attempts"] == (1 if "Exception" in no_retry else 3)
    assert rows[1]["error"] == "UnicodeError: x"
