"""Each kind of file of a run, damaged in many ways, under every command that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.doctor import runfiles as run_check
from hpc_toolkit.doctor.runfiles import check_run
from hpc_toolkit.queue.control import ask_to_drain
from hpc_toolkit.run import Run
from tests.faults.campaignrun import CAMPAIGN, make_campaign
from tests.faults.cut import Commands, Struck, copy_of
from tests.faults.test_damage import soaking
from tests.toyrun import ToyRun

SEGMENT, TABLE, RETRY = (f"stages/items/{kind}/*" for kind in ("items", "results", "retries"))
WORK = ("work", "run", "--lease", "300ms", "--idle-exit", "100ms")
COMMANDS: dict[str, tuple[str, ...]] = {
    "status": ("status", "run"),
    "gather": ("gather", "run", "-o", "rows.jsonl"),
    "gather --partial": ("gather", "run", "--partial", "-o", "some.csv"),
    "explain": ("explain", "run", "--item", "0"),
    "explain TEXT": ("explain", "run", "--item", '"id":1'),
    "logs": ("logs", "run"),
    "doctor --repair": ("doctor", "run", "--repair"),
    "retry": ("retry", "run"),
    "retry --match": ("retry", "run", "--match", "x"),
    "add": ("add", "run", "--items", "more.jsonl"),
    "drain": ("drain", "run"),
    "work": WORK,
    "seal": ("seal", "run"),
}
GARBAGE = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "an object": b"{}",
    "a number": b"7",
    "no JSON": b"{",
    "no UTF-8": b"\xff\xfe\x00",
    "no UTF-8 in a text": b'{"id":"\xff"}',
    "too deep": b"[" * 5000,
}
SOME = ["status", "gather --partial", "explain", "add", "work"]


def ways_of_file(data: bytes) -> Iterator[tuple[str, bytes]]:
    """What may become of a file."""
    yield "half", data[: len(data) // 2]
    for name, garbage in GARBAGE.items():
        yield name, garbage + b"\n" if garbage else b""
    yield from ways_of_object(data)


def ways_of_line(data: bytes, number: int) -> Iterator[tuple[str, bytes]]:
    """What may become of one line of a file; those of equal length leave all others in place."""
    lines = data.split(b"\n")
    old = lines[number]
    same = {f"{name}, as long": one.ljust(len(old)) for name, one in GARBAGE.items()}
    for name, new in [*GARBAGE.items(), *same.items(), *ways_of_object(old)]:
        yield f"line {number + 1}: {name}", b"\n".join([*lines[:number], new, *lines[number + 1 :]])


def ways_of_object(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Each key of an object missing, or of a wrong type."""
    try:
        record: dict[str, Any] = json.loads(text)
    except ValueError:
        return
    for key in record:
        yield f"no {key}", _dump({k: v for k, v in record.items() if k != key})
        for wrong in (None, [None], -1):
            yield f"{key}: {wrong}", _dump({**record, key: wrong})


def _dump(record: object) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


@pytest.fixture(autouse=True)
def _damage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found damaged stays so: no look has to be repeated after a while."""
    monkeypatch.setattr(run_check, "_BEING_WRITTEN_S", 0.0)


def make_run(root: Path, kind: str) -> Path:
    """A run in which one item failed: ``open``, ``published``, or ``retried`` after that."""
    toy = ToyRun(root, 4, unit=2, max_attempts=1, sealed=kind != "open")
    worker = toy.worker("w", interval_s=0.1)
    worker.work(toy.unit_name(0), i0="done", i1="failed")
    if kind == "open":
        ask_to_drain(toy.paths, ["w"])
        sides = [{"mount": {"kind": "tmpfs", "source": "x"}}]
        proof = {"format": 1, "sides": sides, "locks_proven": True, "least_lease_s": 1.0}
        toy.paths.doctor.write_bytes(_dump(proof))
        return root
    worker.work(toy.unit_name(2), i2="done", i3="done")
    worker.finish()
    toy.run.results()
    if kind == "retried":
        toy.reopen().retry()
    return root


def check(ended: Struck, what: str) -> None:
    """It ends, and not as if hpctk had a bug."""
    assert ended.code in (0, 1, 2, 75), (what, ended)
    assert "Traceback" not in ended.err + ended.out, (what, ended)


def results(root: Path) -> dict[int, Any]:
    rows = Run.open(root).results(partial=True)
    return {row["item"]["id"]: row["value"] for row in rows if row["state"] == "done"}


def sweep(
    call: Commands,
    template: Path,
    pattern: str,
    ways: Callable[[bytes], Iterator[tuple[str, bytes]]],
    *,
    share: int,
) -> None:
    """Try one in ``share`` of the ways, each with another command."""
    (source,) = template.glob(pattern)
    whole = source.read_bytes()
    before = results(template)
    root = template.parent / "run"
    names = list(COMMANDS) if share == 1 else SOME
    for number, (way, data) in enumerate(ways(whole)):
        if number % share:
            continue
        copy_of(template, root)
        path = root / source.relative_to(template)
        name = names[number // share % len(names)]
        path.write_bytes(data)
        check(call(*COMMANDS[name], root=root), f"{pattern}, {way}, {name}")
        path.write_bytes(data)
        check_run(root)
        path.write_bytes(whole)
        after = results(root)
        assert {key: after.get(key) for key in before} == before, (pattern, way)


FILES = [
    *(("open", name, None) for name in ("run.json", "doctor.json", "control/*", "workers/w.json")),
    *(("open", name, None) for name in ("stages/items/head", SEGMENT)),
    *(("published", TABLE, None), ("retried", RETRY, None)),
    *(("open", SEGMENT, line) for line in (0, 1, 3)),
    *(("published", TABLE, line) for line in (0, 2)),
]
"""A kind of run, its file, and which line of it is damaged; None: the file itself."""


@pytest.mark.parametrize(("kind", "pattern", "line"), FILES)
@pytest.mark.parametrize("share", [11, soaking(1)])
@pytest.mark.timeout(900)
def test_a_damaged_file_or_line_is_no_bug_and_costs_no_result(
    fast_dir: Path, call: Commands, kind: str, pattern: str, line: int | None, share: int
) -> None:
    ways = ways_of_file if line is None else partial(ways_of_line, number=line)
    sweep(call, make_run(fast_dir / "template", kind), pattern, ways, share=share)


@pytest.mark.parametrize("line", [b"null", b'{"id":3},{"id":4}'])
@pytest.mark.parametrize("name", ["explain TEXT", "add", "work"])
def test_a_damaged_item_is_told_with_its_line_and_accuses_no_other(
    fast_dir: Path, call: Commands, line: bytes, name: str
) -> None:
    root = make_run(fast_dir / "run", "open")
    (path,) = root.glob(SEGMENT)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:4], line.ljust(len(lines[4])), *lines[5:]]))

    ended = call(*COMMANDS[name], root=root)

    assert ended.code == 1, ended
    said = f"{path.relative_to(fast_dir)}, line 5, is damaged: "
    assert said in ended.err
    assert "'hpctk doctor run' shows" in ended.err
    assert said in "".join(one.found for one in check_run(root))
    assert '"permanent"' not in "".join(one.read_text() for one in root.glob("journals/*"))


@pytest.mark.parametrize(
    "damage",
    [
        damage if damage in ("empty", "no JSON", "an object") else soaking(damage)
        for damage in GARBAGE
    ],
)
def test_damaged_settings_of_a_campaign_name_their_file(
    fast_dir: Path, call: Commands, damage: str
) -> None:
    make_campaign(fast_dir / "run")
    (fast_dir / "run/campaign.json").write_bytes(GARBAGE[damage])

    ended = call("campaign", "coordinate", "run", root=fast_dir / "run")

    assert ended.code == 1, ended
    assert "run/campaign.json is damaged, or of another version of hpctk: " in ended.err
    assert "hint: move it away" in ended.err
    assert "campaign.json" in {one.check for one in check_run(fast_dir / "run")}


def test_settings_of_a_campaign_of_a_wrong_type_name_their_key(
    fast_dir: Path, call: Commands
) -> None:
    make_campaign(fast_dir / "run")
    settings: dict[str, Any] = json.loads((fast_dir / "run/run.json").read_text())["campaign"]
    settings["search"]["budget"] = "5"
    (fast_dir / "run/campaign.json").write_bytes(_dump(settings))

    ended = call("campaign", "coordinate", "run", root=fast_dir / "run")

    assert ended.code == 1, ended
    assert "search: budget: '5' is not " in ended.err
    assert CAMPAIGN["search"]["budget"] == 5
