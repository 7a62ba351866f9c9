"""The projects of ``hpctk new``: complete or not there, under a name that is safe to type.

Their commands are run in ``tests/integration/test_docs.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_toolkit.cli.mapping import EXAMPLES, write_example
from hpc_toolkit.errors import ConfigError, RunError
from tests.documents import EXAMPLE_DOCS, REPOSITORY

SOURCE = REPOSITORY / "examples/new"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_its_directory_in_the_repository(tmp_path: Path, example: str) -> None:
    (SOURCE / example / "__pycache__").mkdir(exist_ok=True)  # as an import leaves it

    commands = write_example(tmp_path / "first", example)

    source = {
        path.name: path.read_bytes() for path in (SOURCE / example).iterdir() if path.is_file()
    }
    written = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert "README.md" in source
    assert written.pop(".gitignore").splitlines()[0] == b"/runs/"
    assert written == source
    assert 2 <= len(commands) <= 3
    readme = source["README.md"].decode()
    assert all(f"\n$ {command}\n" in readme for command in commands)
    assert names(tmp_path) == ["first"]
    assert names(SOURCE) == sorted(EXAMPLES)


@pytest.mark.parametrize("document", EXAMPLE_DOCS)
def test_the_readme_of_an_example_is_short_and_its_links_work_anywhere(document: str) -> None:
    text = (REPOSITORY / document).read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 60
    assert "](" not in text
    for path in re.findall(r"https://\S*/blob/main/(\S+\.md)", text):
        assert (REPOSITORY / path).is_file(), path


UNSAFE = [
    *("", ".", "..", "/", "-x", ".x", "a b", "a;b", "$(a)", "a\nb", "a\x1b[2J", "a\n/b", "\udcff"),
]


@pytest.mark.parametrize(
    ("name", "example", "says", "hint"),
    [
        *((name, "list", "cannot be the name", "letters, digits") for name in UNSAFE),
        ("first", "lists", "no example 'lists'", "did you mean 'list'?"),
    ],
)
def test_a_name_that_is_unsafe_to_type_and_an_unknown_example_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, example: str, says: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=says) as caught:
        write_example(Path(name), example)

    assert caught.value.message.isprintable()
    assert hint in caught.value.hint
    assert names(tmp_path) == []


@pytest.mark.parametrize("taken", ["file", "directory", "symlink", "dangling"])
def test_what_exists_is_refused_and_kept(tmp_path: Path, taken: str) -> None:
    target = tmp_path / "first"
    (tmp_path / "other").mkdir()
    if taken == "directory":
        target.mkdir()
        (target / "mine").touch()
    elif taken == "file":
        target.write_text("mine")
    else:
        target.symlink_to("other" if taken == "symlink" else "nowhere")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(RunError, match="first exists") as caught:
        write_example(target, "list")

    assert caught.value.hint == "use another name; only an empty directory is filled"
    assert sorted(tmp_path.rglob("*")) == before
