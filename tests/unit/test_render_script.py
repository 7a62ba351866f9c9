"""The rendered text: pure, signed, and read by sbatch and bash as it was meant."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields, replace
from functools import cache
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit import render as render_module
from hpc_toolkit.clusters import load_cluster
from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.quantities import parse_walltime
from hpc_toolkit.render import render_script, template_names
from hpc_toolkit.scriptfile import origin
from hpc_toolkit.scriptspec import ScriptSpec

PYTHON = "/opt/python"
GENERIC = load_cluster("generic")

# What a careless renderer would pass on to sbatch, bash or Jinja.
HOSTILE = [
    *(
        "\n#SBATCH --evil=1",
        "x\n#SBATCH --evil=1\n",
        "\r",
        "\0",
        "\x1b[2J",
        "\t",
        "\u2028",
        "\u202e",
    ),
    *(
        "$(touch canary)",
        "`touch canary`",
        "${IFS}",
        "$HOME",
        "'; touch canary; '",
        '";touch canary;"',
    ),
    *(
        "a b",
        " ",
        "",
        "-x",
        "--evil",
        "#",
        "# x",
        "\\",
        "a\\",
        "'",
        '"',
        "a'b\"c",
        "~",
        "*",
        "?",
        "!",
    ),
    *("{{ 7*7 }}", "{% raw %}", "<#--", "%", "%q", "%%", "%j", "&", "|", ";", ">", "<", "(", ")"),
    *(
        "ü",
        "名前",
        "\U0001f600",
        "\ud800",
        "\xa0",
        "e\u0301",
        "EOF",
        "x" * 5000,
        "../../etc/passwd",
    ),
]
TEXT_FIELDS = [
    *(
        "job_name",
        "account",
        "partition",
        "qos",
        "reservation",
        "constraint",
        "nodelist",
        "exclude",
    ),
    *("mem", "mem_per_cpu", "mem_per_gpu", "time", "signal", "output", "comment", "mail_type"),
    *("mail_user", "run", "python"),
]
# The fields that become "--name=value" with the value as it was given.
PLAIN_DIRECTIVES = [
    *(
        "job_name",
        "comment",
        "account",
        "partition",
        "qos",
        "reservation",
        "constraint",
        "nodelist",
    ),
    *("exclude", "nodes", "output", "mail_type", "mail_user"),
]


def spec(**given_fields: Any) -> ScriptSpec:
    return ScriptSpec(**{"python": PYTHON, **given_fields})


def sbatch_words(line: str, *, single_quotes: bool) -> list[str]:
    """The arguments that sbatch reads from a line (_get_argument in src/sbatch/opt.c).

    Older versions know no single quotes and cut at a "#" even inside of a word.
    """
    words: list[str] = []
    rest = line
    while rest := rest.lstrip():
        word, quote, position = "", "", 0
        while position < len(rest) and (quote or not rest[position].isspace()):
            letter = rest[position]
            if letter == "\\":
                position += 1
                word += rest[position : position + 1]
            elif quote and letter == quote:
                quote = ""
            elif not quote and (letter == '"' or (single_quotes and letter == "'")):
                quote = letter
            elif letter == "#" and not single_quotes:
                return [*words, word] if word else words
            else:
                word += letter
            position += 1
        assert not quote, f"sbatch would stop at the open quote of {line!r}"
        words.append(word)
        rest = rest[position:]
    return words


def sbatch_options(script: str) -> dict[str, str | None]:
    """What sbatch takes from a script: all lines before the first command."""
    found: dict[str, str | None] = {}
    for line in script.splitlines()[1:]:
        if line.startswith("#SBATCH"):
            old, new = (sbatch_words(line[7:], single_quotes=flag) for flag in (False, True))
            assert old == new, "read differently by older and newer versions of sbatch"
            assert len(new) == 1
            name, equals, value = new[0].removeprefix("--").partition("=")
            assert name not in found
            found[name] = value if equals else None
        elif line and not line.startswith("#"):
            break
    assert script.count("#SBATCH") == len(found), "a directive behind the first command"
    return found


@cache
def bash_accepts(script: str) -> bool:
    checked = subprocess.run(
        ["bash", "-n"], input=script.encode(), check=False, capture_output=True
    )
    return checked.returncode == 0 and not checked.stderr


def embedded_request(script: str) -> dict[str, Any]:
    line = next(line for line in script.splitlines() if line.startswith("# hpctk-spec: "))
    found: dict[str, Any] = json.loads(line.split(" ", 3)[3])
    return found


def assert_reads_back(script: str, request: ScriptSpec) -> None:
    assert bash_accepts(script)
    options = sbatch_options(script)
    for name in PLAIN_DIRECTIVES:
        value = getattr(request, name)
        assert options.get(name.replace("_", "-")) == (None if value is None else str(value))
    if request.time is not None:
        assert parse_walltime(str(options["time"])) == parse_walltime(request.time)
    stored = embedded_request(script)
    assert (stored.pop("template"), stored.pop("cluster")) == ("work-queue", "generic")
    for name in ("modules", "setup"):
        stored[name] = tuple(stored.get(name, ()))
    stored["env"] = tuple((key, value) for key, value in stored.get("env", ()))
    assert ScriptSpec(**stored) == request


def hostile_text() -> st.SearchStrategy[str]:
    fragment = st.sampled_from([*HOSTILE, "a", "gpu", "n1", "10", "/opt/x", "B:USR1@9"])
    joined = st.lists(fragment, min_size=1, max_size=3).map("".join)
    return st.one_of(fragment, joined, st.text(max_size=20), st.text("ab1,.-_%/ []", max_size=12))


def rendered_or_refused(given_fields: dict[str, Any]) -> ScriptSpec | HpcToolkitError:
    """The request, after its script was held against it; or the error that refused it."""
    try:
        request = spec(**given_fields)
        script = render_script(request, GENERIC)
    except HpcToolkitError as error:
        return error
    assert_reads_back(script, request)
    return request


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(TEXT_FIELDS), hostile_text())
def test_any_text_in_any_field_is_refused_or_reads_back(field: str, value: str) -> None:
    needed = {"gpus_per_node": 1} if field == "mem_per_gpu" else {}

    outcome = rendered_or_refused({field: value, **needed})

    if isinstance(outcome, HpcToolkitError):
        assert outcome.message.startswith(f"--{field.replace('_', '-')}")
        assert outcome.message.isprintable()
        assert outcome.hint


@settings(max_examples=150, deadline=None)
@given(hostile_text(), hostile_text(), st.sampled_from(["modules", "setup", "env"]))
def test_any_text_in_the_environment_is_refused_or_reads_back(
    first: str, second: str, field: str
) -> None:
    pairs = ((first, second), ("GREETING", second))

    outcome = rendered_or_refused({field: pairs if field == "env" else (first, second)})

    if isinstance(outcome, HpcToolkitError):
        assert outcome.message.startswith(("--module", "--setup", "--env"))
        assert outcome.message.isprintable()


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.integers(1, 65536),
    gpus=st.integers(0, 128),
    time=st.integers(1, 10**6),
    comment=st.from_regex(r"[a-z ü()=:]{1,30}", fullmatch=True),
    requeue=st.booleans(),
)
def test_any_valid_request_reads_back(
    nodes: int, gpus: int, time: int, comment: str, *, requeue: bool
) -> None:
    request = spec(
        nodes=nodes, gpus_per_node=gpus, time=str(time), comment=comment, requeue=requeue
    )

    script = render_script(request, GENERIC)

    assert_reads_back(script, request)
    assert ("requeue" in sbatch_options(script)) is requeue
    assert render_script(replace(request), load_cluster("generic")) == script


@pytest.mark.parametrize(
    "value", ["a b", "it's", 'a"b', "$(touch canary)", "`x`", "ü", "{{ 7*7 }}"]
)
def test_a_path_may_hold_what_a_shell_would_expand(value: str) -> None:
    """So that the tests above are not passed by refusing everything."""
    request = spec(run=f"runs/{value}", python=f"/opt/{value}/python", env=(("A", value),))

    assert_reads_back(render_script(request, GENERIC), request)


def test_every_text_field_is_tried() -> None:
    texts = {field.name for field in fields(ScriptSpec) if "str" in str(field.type)}

    assert texts - {"modules", "setup", "env"} == set(TEXT_FIELDS)


def test_unknown_template_is_refused_with_the_near_miss() -> None:
    with pytest.raises(RenderError, match="no template is called 'work-que'") as caught:
        render_script(spec(), GENERIC, "work-que")

    assert caught.value.hint == "did you mean 'work-queue'?"


@pytest.mark.parametrize("name", ["base", "../base", "", "a\nb"])
def test_only_complete_templates_can_be_rendered(name: str) -> None:
    with pytest.raises(RenderError, match="no template is called"):
        render_script(spec(), GENERIC, name)


def test_facts_that_nobody_verified_are_named_in_the_header() -> None:
    script = render_script(spec(account="aip-x"), load_cluster("killarney"))

    assert "(facts not verified)" in script.split("#SBATCH", maxsplit=1)[0]
    assert "(facts not verified)" not in render_script(spec(), GENERIC)


def test_a_cluster_given_by_path_is_in_the_command_and_not_in_the_hash() -> None:
    here, there = (replace(GENERIC, file=f"/{place}/generic.toml") for place in ("a", "b"))

    first, second = (render_script(spec(), site) for site in (here, there))

    def facts(script: str) -> str:
        return next(line for line in script.splitlines() if line.startswith("# hpctk-cluster"))

    assert "--cluster /a/generic.toml" in first
    assert facts(first) == facts(second)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text, "rendered"),
        (lambda text: text.replace("--nodes=1", "--nodes=2"), "edited"),
        (lambda text: text + "\n", "edited"),
        (lambda text: text.replace("# hpctk-spec", "# spec"), "edited"),
        (lambda text: text + text.splitlines()[1] + "\n", "edited"),
        (lambda _: "#!/bin/bash\necho mine\n", "foreign"),
        (lambda _: "", "foreign"),
    ],
)
def test_origin_tells_an_edited_script_from_a_rendered_one(change: Any, expected: str) -> None:
    assert origin(change(render_script(spec(), GENERIC))) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ value }}", "written into the script without a filter"),
        ("{{ value ~ 'x' }}", "written into the script without a filter"),
        ("{{ true }}", "written into the script without a filter"),
        ("{{ value|text }}", "would not stay on one line"),
        ("{{ ('name', value)|directive }}", "--name: .* cannot be written into a directive"),
    ],
)
def test_a_template_cannot_write_a_value_unmarked(template: str, message: str) -> None:
    environment = render_module._environment()

    with pytest.raises(RenderError, match=message):
        environment.from_string(template).render(value="a\n#SBATCH --evil")


def test_a_template_cannot_use_a_name_that_does_not_exist() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'nodse' is undefined"):
        render_module._environment().from_string("{{ nodse|sh }}").render(nodes="1")


@pytest.mark.parametrize("name", ["base", *template_names()])
def test_template_is_short_and_does_no_arithmetic(name: str) -> None:
    source = render_module._source(f"{name}.sbatch.j2")

    assert len(source.splitlines()) <= 120
    assert not [
        value
        for _, kind, value in render_module._environment().lex(source)
        if kind == "operator" and value in {"+", "-", "*", "/", "//", "**"}
    ]
