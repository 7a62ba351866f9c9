"""Which nodes of a job still have work."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_toolkit import giveback
from hpc_toolkit.giveback import kept_nodes, shrink
from hpc_toolkit.queue.presence import DRAINING, FINISHED, RUNNING, Presence
from hpc_toolkit.slurm.client import Finished, SlurmError

NODES = ["n1", "n2", "n3"]


def rank(host: str, state: str, **changes: Any) -> Presence:
    fields: dict[str, Any] = {"job": "17", "restart": 1, **changes}
    return Presence(worker="w", host=host, boot="b", pid=1, rank=0, state=state, **fields)


def kept(*ranks: Presence) -> list[str]:
    return kept_nodes(NODES, ranks, job="17", restart=1, first="n1")


def test_a_node_whose_ranks_all_left_is_given_back() -> None:
    assert kept(
        rank("n1", RUNNING), rank("n2", FINISHED), rank("n2", FINISHED), rank("n3", RUNNING)
    ) == ["n1", "n3"]


def test_the_first_node_is_kept_for_the_script() -> None:
    assert kept(*(rank(node, FINISHED) for node in NODES)) == ["n1"]


def test_a_node_that_never_had_ranks_is_given_back_once_the_job_has_started() -> None:
    ranks = [rank("n1", RUNNING), rank("n3", RUNNING)]

    found = kept_nodes(NODES, ranks, job="17", restart=1, first="n1", starting=False)

    assert found == ["n1", "n3"]


@pytest.mark.parametrize("state", [RUNNING, DRAINING])
def test_one_rank_that_has_not_left_keeps_its_node(state: str) -> None:
    assert kept(rank("n2", FINISHED), rank("n2", state)) == NODES


def test_a_node_whose_ranks_have_not_begun_is_kept() -> None:
    assert kept(rank("n2", RUNNING)) == NODES


@pytest.mark.parametrize("changes", [{"job": "18"}, {"job": None}, {"restart": 0}])
def test_ranks_of_other_jobs_and_earlier_starts_say_nothing(changes: dict[str, Any]) -> None:
    assert kept(rank("n2", FINISHED, **changes)) == NODES


def test_shrink_says_what_slurm_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Finished(1, "", "Job update not available right now\n")
    monkeypatch.setattr(giveback, "run", lambda *_, **__: refused)

    with pytest.raises(SlurmError, match="not available right now"):
        shrink("17", ["n1"])
