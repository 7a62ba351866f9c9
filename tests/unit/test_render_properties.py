"""Whatever is asked for: sbatch and bash read the script as it was meant, or it is refused."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.slurm.clusters.facts import Cluster, load_cluster
from hpc_toolkit.slurm.render import check_variable, kinds, setup_words
from hpc_toolkit.slurm.render.directives import complete, directives
from hpc_toolkit.slurm.render.file import read_header
from hpc_toolkit.slurm.render.kinds import prepared
from hpc_toolkit.slurm.render.script import render_script, surroundings
from hpc_toolkit.slurm.render.spec import (
    OPTIONS,
    RIVALS,
    TRAININGS,
    ScriptSpec,
    asked,
    option,
    read_spec,
)
from hpc_toolkit.slurm.render.values import MAX_INDEX, check_dependency, parse_array
from hpc_toolkit.system.processes import WARNING_NAMES
from tests.hostile import HOSTILE, ODD_BUT_FINE

PYTHON = "/opt/python"
GENERIC = replace(load_cluster("generic"), conda_base="/opt/conda", container_runtime="apptainer")

TEXT_FIELDS = [
    field.name
    for field in fields(ScriptSpec)
    if OPTIONS[field.name].value.quantity
    or re.fullmatch(r"str( \| None)?|bool \| str.*", str(field.type))
]
LIST_FIELDS = [field.name for field in fields(ScriptSpec) if "tuple" in str(field.type)]
NEEDS: dict[str, dict[str, Any]] = {
    **{name: {"gpus_per_node": 1} for name in OPTIONS if OPTIONS[name].needs == "gpus_per_node"},
    "container": {"container_python": "/c/python"},
    "container_python": {"container": "/x.sif"},
    "bind": {"container": "/x.sif", "container_python": "/c/python"},
    "stage_dir": {"stage": ("/data/x",)},
}
OF_TRAININGS = {name for name, row in OPTIONS.items() if set(row.templates) <= set(TRAININGS)}
TRAIN = {"nodes": 2, "gpus_per_node": 4}


def spec(**given_fields: Any) -> ScriptSpec:
    if "array" not in given_fields:
        given_fields.pop("array_offset", None)
    return read_spec({"python": PYTHON, **given_fields})


def template_of(request: ScriptSpec) -> str:
    if asked(request).keys() & OF_TRAININGS:
        return "train-multi-node"
    if request.command:
        return "command"
    return "array" if request.array else "work-queue"


def sbatch_words(line: str, *, escapes_space: bool) -> list[str]:
    """The arguments that sbatch reads from a line (get_argument in src/sbatch/opt.c).

    The same in all releases from 17.11 to 26.05, but for a backslash before a space: since 24.05 it
    stands for the space, and before that a space outside of quotes ends the word all the same.
    """
    words: list[str] = []
    rest = line
    while rest := rest.lstrip():
        word, quote, position = "", "", 0
        while position < len(rest) and (quote or not rest[position].isspace()):
            letter = rest[position]
            if letter == "\\":
                position += 1
                ends = not quote and not escapes_space and rest[position : position + 1].isspace()
                if not ends:
                    word += rest[position : position + 1]
                else:
                    position -= 1
            elif quote and letter == quote:
                quote = ""
            elif not quote and letter in "\"'":
                quote = letter
            elif letter == "#" and not quote:
                return [*words, word] if word else words
            else:
                word += letter
            position += 1
        assert not quote, f"sbatch would stop at the open quote of {line!r}"
        words.append(word)
        rest = rest[position:]
    return words


def sbatch_options(script: str) -> list[tuple[str, str | None]]:
    """What sbatch takes from a script: all lines before the first command."""
    found: list[tuple[str, str | None]] = []
    for line in script.split("\n")[1:]:
        if line.startswith("#SBATCH"):
            old, new = (sbatch_words(line[7:], escapes_space=flag) for flag in (False, True))
            assert old == new, "read differently by older and newer versions of sbatch"
            assert len(new) == 1
            name, equals, value = new[0].removeprefix("--").partition("=")
            found.append((name, value if equals else None))
        elif line and not line.startswith("#"):
            break
    lines = [line for line in script.split("\n") if line.lstrip().startswith("#SBATCH")]
    assert len(lines) == len(found), "a directive behind the first command"
    return found


@cache
def bash_accepts(script: str) -> bool:
    checked = subprocess.run(
        ["bash", "-n"], input=script.encode(), check=False, capture_output=True
    )
    return checked.returncode == 0 and not checked.stderr


def assert_reads_back(script: str, request: ScriptSpec) -> None:
    assert bash_accepts(script)
    full = complete(prepared(request, template_of(request), GENERIC), GENERIC)
    assert sbatch_options(script) == directives(full, GENERIC)
    assert read_spec(read_header(script, "x").request) == request


def rendered_or_refused(given_fields: dict[str, Any]) -> ScriptSpec | HpcToolkitError:
    """The request, after its script was held against it; or the error that refused it."""
    if given_fields.keys() & OF_TRAININGS:
        given_fields = {"command": ("train.py",), **TRAIN, **given_fields}
    try:
        request = spec(**given_fields)
        script = render_script(request, GENERIC, template_of(request))
    except HpcToolkitError as error:
        return error
    assert_reads_back(script, request)
    return request


def hostile_text() -> st.SearchStrategy[str]:
    fragment = st.sampled_from(
        [*HOSTILE, "a", "gpu", "n1", "10", "/opt/x", "B:USR1@9", "afterok:1"]
    )
    joined = st.lists(fragment, min_size=1, max_size=3).map("".join)
    return st.one_of(
        fragment, joined, st.text(max_size=20), st.text("ab1,.-_%/ []@:+", max_size=12)
    )


@settings(max_examples=200)
@given(st.sampled_from(TEXT_FIELDS), hostile_text())
def test_any_text_in_any_field_is_refused_or_reads_back(field: str, value: str) -> None:
    outcome = rendered_or_refused({field: value, **NEEDS.get(field, {})})

    if isinstance(outcome, HpcToolkitError):
        assert outcome.message.startswith(option(field))
        assert outcome.message.isprintable()
        assert outcome.hint


@settings(max_examples=150)
@given(hostile_text(), hostile_text(), st.sampled_from(LIST_FIELDS))
def test_any_text_in_any_list_is_refused_or_reads_back(first: str, second: str, field: str) -> None:
    pairs = ((first, second), ("GREETING", second))
    value = pairs if field == "env" else (first, second)

    outcome = rendered_or_refused({field: value, **NEEDS.get(field, {})})

    if isinstance(outcome, HpcToolkitError):
        told = {"command": "the program after --"}.get(field, option(field))
        assert outcome.message.startswith(told)
        assert outcome.message.isprintable()


VALID: dict[str, st.SearchStrategy[Any]] = {
    "account": st.just("physics"),
    "partition": st.sampled_from(["gpu", "gpu,gpu-long"]),
    "constraint": st.sampled_from(["a", "a&b", "[a|b]", "a*2"]),
    "nodelist": st.just("n[1-4],m07"),
    "nodes": st.integers(1, 65536),
    "ntasks": st.integers(1, 10**6),
    "ntasks_per_node": st.integers(1, 64),
    "ntasks_per_gpu": st.integers(1, 4),
    "gpus_per_node": st.integers(0, 16),
    "gpu_type": st.just("a100"),
    "isolate_gpus": st.booleans(),
    "gpu_bind": st.sampled_from(["closest", "map_gpu:0,1", "verbose,single:2", "mask_gpu:0x3,1"]),
    "gres": st.sampled_from(["nvme:1", "nvme:fast:2,shard:1", "bandwidth:10G"]),
    "cpus_per_task": st.integers(1, 256),
    "cpus_per_gpu": st.integers(1, 64),
    "mem": st.sampled_from(["0", "480G", "1024", "1t"]),
    "mem_per_cpu": st.sampled_from(["4G", "4096"]),
    "mem_per_gpu": st.just("64GB"),
    "exclusive": st.sampled_from([False, True, "user", "mcs", "topo"]),
    "oversubscribe": st.booleans(),
    "time": st.integers(1, 10**6).map(str),
    "time_min": st.integers(1, 100).map(str),
    "array": st.sampled_from(["0", "0-99%8", "1,3,5-9:2", "007"]),
    "array_offset": st.integers(0, 10**6),
    "dependency": st.sampled_from(
        ["afterok:1:2", "after:1+5,singleton", "afterany:1_2?aftercorr:3"]
    ),
    "kill_on_invalid_dep": st.booleans(),
    "requeue": st.booleans(),
    "open_mode": st.sampled_from(["append", "truncate"]),
    "output": st.sampled_from(ODD_BUT_FINE).map(lambda name: f"logs/{name.replace('%', '%%')}/%j"),
    "error": st.sampled_from(ODD_BUT_FINE).map(lambda name: f"{name.replace('%', '%%')}.err"),
    "chdir": st.sampled_from(ODD_BUT_FINE).map(lambda name: f"/x/{name}"),
    "sbatch": st.one_of(
        st.sampled_from([(), ("contiguous", "hold"), ("hint=nomultithread", "input=/dev/null")]),
        st.sampled_from([text for text in ODD_BUT_FINE if text]).map(lambda t: (f"comment={t}",)),
    ),
    "run": st.sampled_from(ODD_BUT_FINE).map(lambda name: f"runs/{name}"),
    "python": st.sampled_from(ODD_BUT_FINE).map(lambda name: f"/opt/{name}/python"),
    "env": st.sampled_from(ODD_BUT_FINE).map(lambda text: (("A", text), ("B", ""))),
}


_TOGETHER = "more than|no GPU|shared evenly|leave some|fit"


@settings(max_examples=200)
@given(st.sets(st.sampled_from(sorted(VALID)), max_size=12), st.data())
def test_any_valid_request_reads_back_and_renders_the_same_bytes(
    names: set[str], data: st.DataObject
) -> None:
    for rivals in RIVALS:
        assume(len(names & set(rivals)) < 2)
    request_fields = {name: data.draw(VALID[name], label=name) for name in sorted(names)}
    try:
        request = spec(**request_fields)
        script = render_script(request, GENERIC, template_of(request))
    except HpcToolkitError as error:
        # Each value is fine; only what they come to together may be refused.
        if not re.search(_TOGETHER, error.message):
            raise
        return

    assert_reads_back(script, request)
    assert render_script(replace(request), replace(GENERIC), template_of(request)) == script


def values_in_bash(script: str, cwd: Path) -> dict[str, str]:
    """What bash makes of what the user gave: a variable, and words of the last command."""
    lines = re.findall(r"^export A=.*$", script, re.MULTILINE)
    command = script[script.index("\nexec ") :].replace("\nexec ", "set -- ")
    told = """
printf '%s\\0' A "${A-}" python "$1"
for word do case $word in --run=*) printf '%s\\0' run "${word#--run=}" ;; esac; done"""
    done = subprocess.run(
        ["bash", "-c", "\n".join([*lines, command, told])],
        capture_output=True,
        check=True,
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere"},
    )
    words = done.stdout.decode().split("\0")[:-1]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_bash_assigns_odd_and_hostile_values_and_runs_nothing(tmp_path: Path) -> None:
    """Odd paths are accepted, so that the tests above are not passed by refusing everything."""
    ran = 0
    for text in (*HOSTILE, *ODD_BUT_FINE):
        given_fields: dict[str, Any] = {"run": f"r{text}", "python": f"/p{text}"}
        if text in ODD_BUT_FINE:
            given_fields |= {"chdir": f"/d{text}", "output": f"{text.replace('%', '%%')}/%j.out"}
        try:
            request = spec(**given_fields, env=(("A", text),))
        except HpcToolkitError:
            assert text not in ODD_BUT_FINE, text
            continue
        script = render_script(request, GENERIC)
        assert_reads_back(script, request)
        found = values_in_bash(script, tmp_path)
        assert found == {"run": f"r{text}", "python": f"/p{text}", "A": text}
        ran += 1

    assert ran > 80 + len(ODD_BUT_FINE)
    assert list(tmp_path.iterdir()) == []


def test_every_field_is_tried() -> None:
    named = {field.name for field in fields(ScriptSpec)}
    plain = {name for name in named if name not in TEXT_FIELDS + LIST_FIELDS}

    assert {"job_name", "output", "exclusive", "python", "cpu_bind"} <= set(TEXT_FIELDS)
    assert {"env", "sbatch", "command", "bind", "stage"} <= set(LIST_FIELDS)
    # Numbers and flags: click and test_absurd_numbers_are_refused hold them.
    assert {type(getattr(spec(), name)) for name in plain} <= {int, bool, type(None)}


LONG = "x" * 256
PLAIN_SITE = load_cluster("generic")


def test_every_variable_that_a_fresh_bash_has_of_its_own_is_refused() -> None:
    listed = subprocess.run(
        ["env", "-i", "bash", "--norc", "-c", "compgen -v"],
        capture_output=True,
        text=True,
        check=True,
    )
    free = {"PATH", "TERM", "HOSTNAME", "HOSTTYPE", "MACHTYPE", "OSTYPE", "SHELL"}
    # The last three: set later by bash or the script.
    for name in (set(listed.stdout.split()) - free) | {"FUNCNAME", "COMP_WORDBREAKS", "hpctk_run"}:
        with pytest.raises(RenderError, match="--env: "):
            check_variable(name, "1", "--env")
    for name in ("OMP_NUM_THREADS", "HOME", "PATH", "NCCL_DEBUG", "id", "python"):
        check_variable(name, "1", "--env")


def test_an_assignment_is_no_setup_command() -> None:
    with pytest.raises(RenderError, match="--setup: 'run=/other'") as error:
        setup_words("run=/other", "--setup")

    assert "--env run=/other" in error.value.hint


@pytest.mark.parametrize(
    ("field", "values", "taken"),
    [
        # A name that no filesystem takes.
        *((field, [f"/scratch/{LONG}/x"], False) for field in ("output", "run")),
        *((field, [f"/scratch/{LONG[1:]}/x"], True) for field in ("output", "run")),
        # A log that some Slurm would not take for this file, or in a directory that it alone names.
        ("output", [".", "..", "logs/..", "logs/.", "%", "logs/50%", "x%%%"], False),
        ("output", ["%j/x.out", "logs/%x/%j.out", "a/%5A/b/x", "%%%j/x", "5%/%u/x"], False),
        ("output", ["%5/%j/x"], False),
        ("output", ["logs/%x-%j.out", "a%%j/%j.out", "50%/%j.out", "/a/%N"], True),
    ],
)
def test_a_path_that_no_filesystem_or_no_slurm_takes_is_refused(
    field: str, values: list[str], taken: bool
) -> None:
    for value in values:
        with nullcontext() if taken else pytest.raises(RenderError, match="is not accepted"):
            OPTIONS[field].value.check(value, "--x")


def around(site: Cluster = PLAIN_SITE, **fields: Any) -> dict[str, Any]:
    full = complete(ScriptSpec(python="/opt/python", **fields), site)
    started = kinds.started(full, "work-queue", site)
    return surroundings(full, site, directives(full, site), "work-queue", started)


@pytest.mark.parametrize(
    "fields",
    [
        {"conda": "torch-2.5"},
        {"conda": "/home/é ö/miniforge3/envs/x"},
        {"venv": "/scratch/it's mine/$venv"},
        {"container": "images/a b.sif"},
        {"container": "docker://nvcr.io/nvidia/pytorch:24.01-py3"},
        {"container": "nvcr.io#nvidia/pytorch:24.01-py3"},
        {"container": "x", "bind": ("/a", "/a b:/c", "/a:/b:ro")},
        {"node_setup": ("tar xf '/data/a b.tar' -C /tmp",)},
        {"teardown": ("rm -r /tmp/x",)},
        {"command": ("python", "-c", "print('$(x)')", "", "--flag")},
        *({"job_name": name} for name in ("run 7/b: lr=0.1, x", "a@b+c")),
        *({"signal": f"B:{name}@120"} for name in ("SIGUSR1", *WARNING_NAMES.split())),
        *({"gres": text} for text in ("tmpfs:100G", "nvme:fast:2k")),
        *({"constraint": text} for text in ("[(a&b)*2&c*1]", "a|b&c")),
        {"nodelist": "n[1-3,7],r[0-1]n[00-15]"},
        {"exclude": "r[0-1]n[00-15]"},
    ],
)
def test_ordinary_odd_values_are_accepted(fields: dict[str, Any]) -> None:
    ScriptSpec(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *[({"conda": value}, "--conda: ") for value in ("a\nb", "", "-x", "a b", "/opt/a:b")],
        *[
            ({"venv": value}, "--venv: ")
            for value in ("a\nb", "~/venv", "/opt/a:b", "/" + 5000 * "x")
        ],
        *[({"container": value}, "--container: ") for value in ("a\nb", "", "-x")],
        *[
            ({"container": "x", "bind": (value,)}, "--bind: ")
            for value in ("a\nb", "a", "/a,/b", "/a:b", "/a:/b:rx")
        ],
        *[({"node_setup": (value,)}, "--node-setup: ") for value in ("a\nb", "a; b", "$HOME/x")],
        *[({"teardown": (value,)}, "--teardown: ") for value in ("a | b", "`x`")],
        *[({"command": (value,)}, "the program after --: ") for value in ("a\nb", "", "-x")],
        ({"command": ("x", "a\nb")}, "the program after --: "),
        ({"command": ("x", 40000 * "x")}, "the program after --: "),
        ({"command": ("x", *(5 * [30000 * "x"]))}, "longer than 131072 characters"),
        ({"conda": "x", "venv": "/x"}, "--conda and --venv exclude each other"),
        ({"bind": ("/a",)}, "--bind needs --container"),
    ],
)
def test_a_value_that_could_be_misread_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RenderError, match=message) as caught:
        ScriptSpec(**fields)

    assert caught.value.hint


def test_conda_is_sourced_from_the_sites_base_or_from_that_of_the_path() -> None:
    site = replace(PLAIN_SITE, conda_base="/opt/conda/")
    named = around(site, conda="torch")["preparation"]
    by_path = around(conda="/home/u/forge/envs/x")["preparation"]

    assert [words for words, _ in named] == [
        ["source", "/opt/conda/etc/profile.d/conda.sh"],
        ["conda", "activate", "torch"],
    ]
    assert by_path[0][0] == ["source", "/home/u/forge/etc/profile.d/conda.sh"]
    assert by_path[1][0] == ["conda", "activate", "/home/u/forge/envs/x"]


@pytest.mark.parametrize(
    ("text", "written", "highest"),
    [
        ("0", "0", 0),
        ("0-99%8", "0-99%8", 99),
        ("1,3,5-9:2", "1,3,5-9:2", 9),
        ("007,012-013", "7,12-13", 13),
        ("5,1", "5,1", 5),
        (f"{MAX_INDEX}", f"{MAX_INDEX}", MAX_INDEX),
    ],
)
def test_an_array_is_written_without_leading_zeros(text: str, written: str, highest: int) -> None:
    found = parse_array(text, "--array")

    assert (found.text, found.highest) == (written, highest)


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "0-9:0", "0-9%0", "0-9%", "1,,2", "0 - 9", "0-9%1%1", "\u0661"]
)
def test_an_array_that_sbatch_refuses_is_refused(text: str) -> None:
    with pytest.raises(RenderError, match=r"--array: .* is not accepted") as caught:
        parse_array(text, "--array")

    assert "0-99" in caught.value.hint
    with pytest.raises(RenderError, match="index 4000001 is too high"):
        parse_array(f"0-{MAX_INDEX + 1}", "--array")


@pytest.mark.parametrize(
    ("texts", "accepted"),
    [
        (["afterok:1", "afterok:1:2", "afterany:1_3", "afterany:1_*", "after:1"], True),
        (["after:1+5:2+10", "singleton", "singleton,afterok:2", "afterburstbuffer:4"], True),
        (["afternotok:1?aftercorr:2"], True),
        (["", "1", "afterok", "afterok:", "afterok:a", "afterok:0", "afterok:1+5"], False),
        (["after:1+", "bogus:1", "afterok:1,", "singleton:1", "afterok:1 ", "AFTEROK:1"], False),
        (["afterok:1,afterany:2?after:3"], False),
    ],
)
def test_a_dependency_that_sbatch_refuses_or_guesses_is_refused(
    texts: list[str], accepted: bool
) -> None:
    for text in texts:
        refused = pytest.raises(RenderError, match=r"--dependency: .* is not accepted")
        with nullcontext() if accepted else refused:
            check_dependency(text, "--dependency")
