"""The documents: links lead somewhere, words and modules are the code's, examples check out.

What they say of commands is run in ``tests/integration/test_docs.py``."""

from __future__ import annotations

import inspect
import json
import re
import zlib
from pathlib import Path

import pytest

import hpc_toolkit
from hpc_toolkit.cli import EXIT_BUG
from hpc_toolkit.queue.units import Segment, plan_units, runs_of
from hpc_toolkit.rundir.journal import decode_line
from hpc_toolkit.science import metrics
from hpc_toolkit.science.metrics import METRICS, STANDARD
from hpc_toolkit.science.workloads.layer_metrics import LayerMetrics
from hpc_toolkit.science.workloads.onepass import OfCheckpoints
from hpc_toolkit.science.workloads.text_tasks import TASKS
from hpc_toolkit.slurm.clusters.facts import VARIABLES
from tests import manpage
from tests.documents import DOCS, PACKAGE, REPOSITORY, USER_DOCS, public_names, read_blocks


def test_blocks_that_are_not_run_say_why() -> None:
    for name in USER_DOCS:
        for block in read_blocks(REPOSITORY / name):
            if block.not_run is not None:
                assert len(block.not_run.split()) >= 2, f"{name}:{block.line}: no reason"


def test_relative_links_lead_to_files() -> None:
    dead = [f"{path}: {target}" for path in DOCS for target in links(path) if is_dead(path, target)]

    assert not dead


def links(path: Path) -> list[str]:
    """The targets of a document's links to other files and headings of the project."""
    targets = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target]


def is_dead(path: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    found = path.parent / file if file else path
    return not found.exists() or bool(anchor and anchor not in anchors(found))


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_glossary_defines_few_terms_and_each_once() -> None:
    text = (REPOSITORY / "docs/glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"\*\*([\w ]+)\*\*", text)

    assert len(terms) == len(set(terms)) < 40


def test_an_arm_of_a_search_has_one_name_and_one_word_is_for_one_thing() -> None:
    examples = [*REPOSITORY.glob("examples/**/*.toml"), *REPOSITORY.glob("examples/**/*.md")]
    named = [path for path in DOCS if "decisions" not in path.parts] + examples
    banned = r"\b(master|slaves?|experiments?|sessions?|sharding_unit|work_unit|grab)\b"
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}

    assert [path for path in named if "candidate" in path.read_text(encoding="utf-8").lower()] == []
    assert [path for path, text in texts.items() if re.search(banned, text, re.IGNORECASE)] == []


def test_tests_that_the_documents_name_exist_and_every_invariant_names_one() -> None:
    defined = {
        name
        for path in (REPOSITORY / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))
    }
    for path in (REPOSITORY / "docs/guarantees.md", REPOSITORY / "docs/how-checked.md"):
        named = re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8"))
        assert named
        assert set(named) <= defined, path
    text = (REPOSITORY / "docs/how-checked.md").read_text(encoding="utf-8")
    invariants = [f"I{number}" for number in range(1, 10)]
    assert re.findall(r"^\| (I\d) \|.*$", text, re.MULTILINE) == invariants
    assert re.findall(r"^\| (I\d) \|.*`test_\w+`.*$", text, re.MULTILINE) == invariants


LENGTHS = {"README.md": 150, "CONTRIBUTING.md": 60, "CHANGELOG.md": 60, "docs/decisions/*.md": 60}


@pytest.mark.parametrize(("pattern", "lines"), LENGTHS.items())
def test_documents_stay_short(pattern: str, lines: int) -> None:
    paths = list(REPOSITORY.glob(pattern))

    assert paths
    for path in paths:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= lines, path


def test_decisions_have_their_parts_and_a_line_in_the_list() -> None:
    paths = set((REPOSITORY / "docs/decisions").glob("*.md"))
    paths.remove(REPOSITORY / "docs/decisions/README.md")
    contents = (REPOSITORY / "docs/decisions/README.md").read_text(encoding="utf-8")
    parts = ["Context", "Decision", "Consequences", "Alternatives"]

    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == parts, path
        assert f"({path.name})" in contents, path


def test_documents_that_the_code_names_exist_and_decisions_have_no_numbers() -> None:
    code = [
        *PACKAGE.rglob("*.py"),
        *(REPOSITORY / "tests").rglob("*.py"),
        *REPOSITORY.glob("*.toml"),
    ]
    for path in [*code, *DOCS, REPOSITORY / "benchmarks/results.md"]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?i)\bdecisions?\s+\[?\d{4}\b", text), path
        if path not in DOCS:
            for name in re.findall(r"\bdocs/[\w/-]+\.md\b", text):
                assert (REPOSITORY / name).exists(), f"{path}: {name}"


def test_the_reference_names_every_variable_of_the_package() -> None:
    text = (REPOSITORY / "docs/reference/environment.md").read_text(encoding="utf-8")
    variable = re.compile(r"\bHPCTK_[A-Z_]*[A-Z]\b")
    code = [*PACKAGE.rglob("*.py"), *(REPOSITORY / "templates").iterdir()]
    used = {name for path in code for name in variable.findall(path.read_text(encoding="utf-8"))}

    assert used | VARIABLES.keys() == set(variable.findall(text))


def test_the_reference_has_the_exit_codes_of_the_command_line() -> None:
    text = (REPOSITORY / "docs/reference/exit-codes.md").read_text(encoding="utf-8")

    codes = set(re.findall(r"^\| (\d+) \|", text, re.MULTILINE))

    assert codes == {*manpage.STATUS, str(EXIT_BUG)}


def test_documents_and_examples_import_only_public_names() -> None:
    public = {"hpc_toolkit": hpc_toolkit.__all__, **public_names()}
    found = (REPOSITORY / "examples").rglob("*")
    examples = [path for path in found if path.is_file() and path.suffix != ".pyc"]
    statement = re.compile(r"from (hpc_toolkit[\w.]*) import (\w+(?:, *\w+)*|\(\s*(?:\w+,\s*)+\))")
    imported = [
        (module, name)
        for path in [*(REPOSITORY / name for name in USER_DOCS), *examples]
        for module, names in statement.findall(path.read_text(encoding="utf-8"))
        for name in re.findall(r"\w+", names)
    ]

    assert len(imported) > 50
    for module, name in imported:
        assert f"{module}.{name}" in public or name in public[module], f"{module}.{name}"


def format_blocks() -> list[str]:
    return [
        block.text
        for block in read_blocks(REPOSITORY / "runs/README.md")
        if block.language == "json"
    ]


def test_lines_of_the_format_are_journal_lines_and_its_release_sums_those_before_it() -> None:
    every = [line for text in format_blocks() for line in text.splitlines() if '"crc"' in line]
    journal = [line for line in every if '"pad"' not in line]
    block = next(text for text in format_blocks() if '"release"' in text).encode()
    *lines, last = block.splitlines(keepends=True)
    release = json.loads(last)

    assert len(journal) >= 4
    assert [line for line in journal if decode_line(line.encode()) is None] == []
    assert zlib.crc32(b"".join(lines)) == int(release["sum"], 16)
    assert release["lines"] == release["done"] == len(lines)


def test_segment_header_of_the_format_is_one(tmp_path: Path) -> None:
    header = next(text for text in format_blocks() if '"units"' in text)
    path = tmp_path / "segment.jsonl"
    body = b""
    for _, count, offset, _ in json.loads(header)["units"]:
        body = body.ljust(offset) + b"{}\n" * count
    path.write_bytes(header.encode() + body)

    segment = Segment(path, 1)

    groups = [unit.group for unit in segment.units for _ in unit.items]
    assert plan_units(runs_of(groups), segment.count) == [(u.first, u.count) for u in segment.units]
    assert segment.order is not None
    assert sorted(segment.order) == list(range(segment.count))


GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "representations.md"

GIVEN = {
    "prompt": "tokens of each prompt",
    "tokens": "all tokens of all prompts",
    "dataset": "prompt means",
    "views": "means of",
}


def rows() -> dict[str, list[str]]:
    """The cells behind each name, those of ``the same`` filled in."""
    text = GUIDE.read_text(encoding="utf-8")
    table = text.partition("| name in results |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    found: dict[str, list[str]] = {}
    last: list[str] = []
    for name, *others in cells[2:]:
        last = [a if b == "the same" else b for a, b in zip(last or others, others, strict=True)]
        found[name.strip("`")] = last
    return found


def test_the_guide_has_every_metric_in_order_and_the_standard_ones_first() -> None:
    names = list(rows())

    assert names == list(METRICS)
    assert set(names[: len(STANDARD)]) == set(STANDARD)


@pytest.mark.parametrize("name", METRICS)
def test_the_guide_says_what_a_metric_is_given_and_its_range(name: str) -> None:
    function, given, told, cost = rows()[name]

    (called,) = re.findall(r"^`(\w+)`", function)
    assert called in metrics.__all__
    assert given.startswith(GIVEN[METRICS[name].scope])
    assert told.startswith(METRICS[name].about.rpartition(": ")[2].replace("..", " to "))
    assert set(re.findall(r"[a-z]\w*", cost)) <= {"n", "d", "q", "d1", "d2", "min", "max"}
    fewest = METRICS[name].fewest
    assert fewest <= 3 or f"at least {fewest} prompts" in GUIDE.read_text(encoding="utf-8")


WORKLOADS = Path(__file__).parents[2] / "docs" / "how-to" / "workloads.md"


def test_the_guide_names_the_tasks_and_no_others() -> None:
    listed = WORKLOADS.read_text(encoding="utf-8").partition("Tasks: ")[2].partition(".")[0]

    assert re.findall(r"`([^`]+)`", listed) == list(TASKS)


def test_the_guide_names_the_options_that_decide_numbers_and_memory() -> None:
    named = set(re.findall(r"`(\w+)`", WORKLOADS.read_text(encoding="utf-8")))

    options = {"final_norm", "max_batch_tokens", "batch_size", "views", "metrics"}
    shared = set(inspect.signature(OfCheckpoints).parameters)
    assert options <= shared | set(inspect.signature(LayerMetrics).parameters)
    assert options <= named
