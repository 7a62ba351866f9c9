"""Times and sizes by Slurm's grammar, records, lists of JSON texts, and imports at start-up."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import importlib.util
import json
import math
import py_compile
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError, ItemsError
from hpc_toolkit.queue.items import check_items
from hpc_toolkit.system import quantities as q
from hpc_toolkit.system.installation import listed_imports
from hpc_toolkit.system.jsonlines import decode_each, encode_each, without_collections
from hpc_toolkit.system.record import Record, asdict, fresh

DURATIONS = [
    ("90s", 90),
    ("250 ms", 0.25),
    ("10min", 600),
    ("10m", 600),
    ("1.5h", 5400),
    ("2d", 172800),
    ("1h30min", 5400),
    ("4 min 10 s", 250),
    ("1:30:00", 5400),
    ("90:00:00", 324000),
    ("1-12", 129600),
    ("1-2:3", 86400 + 7380),
    ("1-00:00:30", 86430),
]
"""Durations that every option reads."""

NOT_TIMES = [
    *("", "x", "-5", "-1s", "+5", "1:2:3:4", "1-", "-1:00", "1-1:1:1:1", "1:", ":1", "s", "1hh"),
    *("UNLIMITED", "nan", "inf", "1e3", " 5", "5 ", "5\n", "5s\n", "\u0665", "5 weeks", "1h x"),
]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [*DURATIONS, ("5", 300), ("90", 5400), ("1:30", 90), ("0-0:1", 60), ("2-00:00:01", 172801)],
)
def test_parse_walltime_reads_durations_and_every_form_of_sbatch(text: str, seconds: float) -> None:
    assert q.parse_walltime(text) == math.ceil(seconds)


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (q.parse_walltime, [*NOT_TIMES, "1.5"], "--x: .* is not a time limit"),
        (q.parse_duration, [*NOT_TIMES, "1:30"], "--x: .* is not a duration"),
    ],
)
def test_times_of_another_grammar_are_refused(
    parse: Callable[..., float], texts: list[str], message: str
) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=message) as caught:
            parse(text, where="--x")
        assert "min" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((zero, "zero") for zero in ("0", "0:0", "00:00:00", "0-0", "0s")),
        *((large, "too large") for large in ("999999999999", "24856-0", "99999999d")),
    ],
)
def test_parse_walltime_of_zero_or_overflow_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"time: '{text}' is {problem}"):
        q.parse_walltime(text)


@given(st.integers(1, q.MAX_WALLTIME_S))
def test_walltime_round_trips(seconds: int) -> None:
    assert q.parse_walltime(q.format_walltime(seconds)) == seconds


@pytest.mark.parametrize(("text", "seconds"), DURATIONS)
def test_parse_duration_reads_units_and_clock(text: str, seconds: float) -> None:
    assert q.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "90", "0.5", "00"])
def test_parse_duration_of_a_bare_number_is_refused_with_the_fix(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--every: '{text}' has no unit") as caught:
        q.parse_duration(text, where="--every")

    assert caught.value.hint == f"write {text}s, {text}min or {text}h"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0321, "32 ms"),
        (0.9996, "1.0 s"),
        (3.21, "3.2 s"),
        (59.97, "1 min 00 s"),
        (250, "4 min 10 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (86399, "1 d 00 h"),
        (100 * 3600, "4 d 04 h"),
        (-3.2, "-3.2 s"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_format_duration_is_short(seconds: float, text: str) -> None:
    assert q.format_duration(seconds) == text


@given(st.floats(0.001, 1e8))
def test_format_duration_parses_back_within_its_precision(seconds: float) -> None:
    parsed = q.parse_duration(q.format_duration(seconds))

    # Half of the last unit shown: a millisecond, 0.1 s, a second, a minute or an hour.
    steps = ((1, 0.001), (60, 0.1), (3600, 1), (86400, 60), (math.inf, 3600))
    step = next(step for below, step in steps if seconds < below)
    assert abs(parsed - seconds) <= step * 0.51


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1B", 1),
        ("512B", 512),
        ("1K", 1024),
        ("1.5G", 3 * 2**29),
        ("1.5 GiB", 3 * 2**29),
        ("10GB", 10 * 2**30),
        ("64Gi", 2**36),
        ("2t", 2**41),
        ("1P", 2**50),
    ],
)
def test_parse_size_is_binary(text: str, size: int) -> None:
    assert q.parse_size(text) == size


@pytest.mark.parametrize("parse", [q.parse_size, q.parse_mem_mib])
@pytest.mark.parametrize(
    "text", ["", "-1", "nan", "1E", "G", "1 G G", "1e9", "0x10", "1G\n#", "1\u212a"]
)
def test_size_of_something_else_is_refused(parse: Callable[..., int], text: str) -> None:
    with pytest.raises(ConfigError, match=r"here: .* is not a"):
        parse(text, where="here")


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        *(("480G", 491520), ("10GB", 10240), ("1T", 2**20), ("1K", 1), ("2m", 2)),
        *(("1.5G", 1536), ("1P", 2**30), ("512 MiB", 512)),
    ],
)
def test_sizes_in_mib_are_rounded_up(text: str, mib: int) -> None:
    assert q.parse_size_mib(text) == q.parse_mem_mib(text) == mib


@given(st.integers(0, 2**39))
def test_mem_round_trips(mib: int) -> None:
    assert q.parse_mem_mib(q.format_mem(mib), zero=True) == mib


@given(st.integers(1, 2**53))
def test_format_size_parses_back_within_its_precision(size: int) -> None:
    assert q.parse_size(q.format_size(size)) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**60, "1024.0 PiB"),
        (-1, "-1 B"),
    ],
)
def test_format_size_is_short(size: int, text: str) -> None:
    assert q.format_size(size) == text


class Point(Record):
    x: int
    y: int = 2
    tags: dict[str, int] = fresh(factory=dict)


class Named(Record, frozen=False, kw_only=True):
    name: str = ""
    at: Point

    def __post_init__(self) -> None:
        if self.name == "bad":
            message = "bad name"
            raise ValueError(message)


def test_values_come_by_position_by_name_or_from_defaults() -> None:
    assert Point(1) == Point(1, 2, {}) == Point(x=1, y=2)
    assert Point(1) != Point(3)
    assert Point(1) != (1, 2, {})
    assert repr(Named(at=Point(1))) == "Named(name='', at=Point(x=1, y=2, tags={}))"


@pytest.mark.parametrize(
    ("given", "named"),
    [((), {}), ((1, 2, {}, 4), {}), ((1,), {"z": 3}), ((), {"x": 1, "z": 3}), ((), {"y": 1})],
)
def test_a_missing_or_unknown_value_is_refused(given: Any, named: Any) -> None:
    with pytest.raises(TypeError, match="Point takes x, y, tags"):
        Point(*given, **named)
    with pytest.raises(TypeError, match="Named takes name, at"):
        Named("a", Point(1))  # type: ignore[call-arg]


def test_the_functions_of_dataclasses_take_records() -> None:
    named = Named(name="a", at=Point(1))

    assert [one.name for one in dataclasses.fields(Named)] == ["name", "at"]
    assert dataclasses.asdict(named) == asdict(named)
    assert dataclasses.replace(named, name="b").name == "b"
    assert copy.deepcopy(named) == copy.copy(named) == named


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=5)
NUMBERS = st.integers() | st.integers(-(10**40), 10**40) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | ANY_TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT | st.integers(0, 2), inner)
    ),
    max_leaves=6,
)
ODD = ["", " ", "NaN", "-Infinity", "1e999", "\\", '"\\ud800"', "\x7f", "\ufeff", '{"a":1,"a":2}']
PARTS = ["{", "}", "[", "]", ",", ":", '"', '"a"', "1", '{"a":1', '"b":2}', '{"a":1},{"b":2}']
TEXTS = st.sampled_from([*ODD, *PARTS]) | VALUES.map(json.dumps)


def attempt(call: Callable[[], Any]) -> str:
    """What a call gives, or that it refuses."""
    try:
        return repr(call())
    except (ItemsError, TypeError, ValueError):
        return "refused"


def strict(text: str) -> Any:
    """What json decodes, without the constants that JSON does not have."""
    constants: list[str] = []
    found = json.loads(text, parse_constant=constants.append)
    if constants:
        raise ValueError(constants)
    return found


@given(st.lists(VALUES, max_size=5))
def test_values_are_encoded_as_json_does_one_by_one(values: list[Any]) -> None:
    def one(value: Any) -> bytes:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

    assert attempt(lambda: encode_each(values)) == attempt(lambda: list(map(one, values)))


@given(st.lists(TEXTS, max_size=4))
def test_texts_are_decoded_or_refused_as_json_does_one_by_one(texts: list[str]) -> None:
    together = attempt(lambda: decode_each([text.encode() for text in texts]))

    assert together == attempt(lambda: list(map(strict, texts)))


@pytest.mark.parametrize(
    "texts",
    [
        [b'{"a":1', b'"b":2}'],
        [b'{"a":1},{"b":2}', b'{"c":[3', b"4]}"],
        [b'{"a":1}]', b'[{"b":2}'],
        [b'{"a":"\xff"}'],
    ],
)
def test_texts_that_are_json_only_together_are_refused(texts: list[bytes]) -> None:
    assert attempt(lambda: decode_each(texts)) == "refused"


@settings(max_examples=40)
@given(st.lists(st.dictionaries(ANY_TEXT | st.integers(0, 2), VALUES), min_size=2, max_size=6))
def test_items_are_duplicates_iff_they_are_equal_with_sorted_keys(items: list[Any]) -> None:
    def canonical(item: Any) -> str:
        text = json.dumps(item, sort_keys=True, allow_nan=False)
        if json.loads(text) != item:
            raise ValueError(item)  # a key was not text
        return text

    def by_form() -> bool:
        return len(set(map(canonical, items))) == len(items)

    def checked() -> bool:
        return len(check_items(items, group_by=None)) == len(items)

    assert (attempt(checked) == "True") == (attempt(by_form) == "True")


def test_collections_go_on_after_the_block() -> None:
    before = gc.isenabled()
    gc.enable()
    try:
        with without_collections():
            assert not gc.isenabled()

        assert gc.isenabled()
    finally:
        if not before:
            gc.disable()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on sys.path, whose modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def described(spec: Any) -> tuple[object, ...]:
    return (
        *(spec.name, spec.origin, spec.cached, spec.has_location),
        list(spec.submodule_search_locations or ()),
    )


def agreed(name: str) -> Any:
    """What Python's finder finds, which must also be found in the block."""
    expected = importlib.util.find_spec(name)
    with listed_imports():
        found = importlib.util.find_spec(name)
    assert (found is None) == (expected is None)
    assert expected is None or described(found) == described(expected)
    return expected


@pytest.mark.parametrize("name", ["xml.dom.minidom", "_json", "difflib", "numpy"])
def test_the_same_module_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in [one for one in sys.modules if one == name]:
        monkeypatch.delitem(sys.modules, known)

    agreed(name)


def test_modules_packages_and_namespaces_are_imported(place: Path) -> None:
    (place / "alone_x.py").write_text("value = 'alone'\n")
    for name in ("package_x", "namespace_x"):
        (place / name).mkdir()
    (place / "package_x" / "__init__.py").write_text("value = 'package'\n")
    (place / "package_x" / "inner.py").write_text("value = 'inner'\n")
    (place / "namespace_x" / "inner.py").write_text("value = 'named'\n")
    names = ["alone_x", "package_x", "package_x.inner", "namespace_x.inner"]

    with listed_imports():
        found = [importlib.import_module(name).value for name in names]

    assert found == ["alone", "package", "inner", "named"]
    with listed_imports(), pytest.raises(ModuleNotFoundError, match="missing_x"):
        importlib.import_module("package_x.missing_x")


@pytest.mark.parametrize("name", ["both_x", "both_x/__init__"])
def test_an_extension_module_comes_before_its_source(place: Path, name: str) -> None:
    for suffix in (".py", EXTENSION_SUFFIXES[0]):
        file = place / f"{name}{suffix}"
        file.parent.mkdir(exist_ok=True)
        file.write_text("")

    assert agreed("both_x").origin.endswith(EXTENSION_SUFFIXES[0])


def test_modules_of_an_archive_and_without_their_source_are_imported(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zipfile import ZipFile

    source = place / "sourceless_x.py"
    source.write_text("value = 'compiled'\n")
    py_compile.compile(str(source), cfile=str(place / "sourceless_x.pyc"))
    source.unlink()
    with ZipFile(place / "all.zip", "w") as archive:
        archive.writestr("zipped_x.py", "value = 'zipped'\n")
    for entry in (place / "all.zip", place / "gone"):
        monkeypatch.syspath_prepend(entry)

    with listed_imports():
        assert importlib.import_module("zipped_x").value == "zipped"
        assert importlib.import_module("sourceless_x").value == "compiled"


def test_what_is_not_a_file_hides_no_module(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "colorsys.py").symlink_to("nowhere")
    (place / "chunk.py").mkdir()
    for name in ("colorsys", "chunk"):
        monkeypatch.delitem(sys.modules, name, raising=False)

        agreed(name)
