"""Both hosts race for the names of symlinks, on which claims and log entries rest (rule R1)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.sharedfs.hosts import HOSTS
from tests.sharedfs.plays import FUSE_KINDS, NFS_KINDS
from tests.sharedfs.sides import Side

if TYPE_CHECKING:
    from tests.sharedfs.filesystems import Filesystem


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(0.6, id="small"),
        pytest.param(60.0, id="full", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
@pytest.mark.parametrize("name", [kind.name for kind in (*FUSE_KINDS, *NFS_KINDS)])
def test_each_name_that_two_hosts_race_for_has_one_owner_whom_both_read(
    filesystem: Filesystem, name: str, seconds: float
) -> None:
    """Names that GlusterFS refuses to both are asked for again, until one of them has it."""
    directory = f"names-{seconds:g}"
    filesystem.hosts.call(HOSTS[0], "mkdir", filesystem.shared / directory)
    filesystem.hosts.call(HOSTS[1], "ls", filesystem.shared / directory)
    at = filesystem.shared / directory
    racers = {host: Side(filesystem, host, "racer", at, host, seconds) for host in HOSTS}
    try:
        for racer in racers.values():
            racer.tell("go")
        raced = {host: json.loads(racer.line()) for host, racer in racers.items()}
        end = max(found["end"] for found in raced.values())
        for racer in racers.values():
            racer.tell(end)
        seen = {host: json.loads(racer.line()) for host, racer in racers.items()}
    finally:
        for racer in racers.values():
            racer.close()

    _check(raced, seen)
    both = set(raced[HOSTS[0]]["owners"]) & set(raced[HOSTS[1]]["owners"])
    again = sum(found["again"] for found in raced.values())
    print(f"{name}: {len(both)} names raced for by both hosts, {again} times asked again")
    assert both


def _check(raced: dict[str, Any], seen: dict[str, list[str | None]]) -> None:
    """Whoever tried a name was told its owner, who knows it, and whom all read afterwards."""
    tried = [found["owners"] for found in raced.values()]
    assert seen[HOSTS[0]] == seen[HOSTS[1]]
    for index, owner in enumerate(seen[HOSTS[0]]):
        told = {owners[str(index)] for owners in tried if str(index) in owners}
        assert told <= {owner} - {None}, f"name {index} of {owner} was told as {told}"
        assert owner is None or raced[owner]["owners"][str(index)] == owner
