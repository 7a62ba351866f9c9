"""Which nodes of a job still have work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.queue.presence import DRAINING, FINISHED, RUNNING, Presence
from hpc_toolkit.slurm.batch.work import kept_nodes, shrink_job
from hpc_toolkit.slurm.client import SlurmError
from hpc_toolkit.system import processes
from hpc_toolkit.system.ranks import RankInfo
from tests.fakeslurm import Programs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.toyrun import ToyRun

NODES = ["n1", "n2", "n3"]


def rank(host: str, state: str, **changes: Any) -> Presence:
    fields: dict[str, Any] = {"job": "17", "restart": 1, **changes}
    return Presence(worker="w", host=host, boot="b", pid=1, rank=0, state=state, **fields)


def kept(*ranks: Presence) -> list[str]:
    return kept_nodes(NODES, ranks, RankInfo(job_id="17", restart=1), first="n1")


def test_a_node_whose_ranks_all_left_is_given_back() -> None:
    assert kept(
        rank("n1", RUNNING), rank("n2", FINISHED), rank("n2", FINISHED), rank("n3", RUNNING)
    ) == ["n1", "n3"]


def test_the_first_node_is_kept_for_the_script() -> None:
    assert kept(*(rank(node, FINISHED) for node in NODES)) == ["n1"]


def test_a_node_that_never_had_ranks_is_given_back_once_the_job_has_started() -> None:
    ranks = [rank("n1", RUNNING), rank("n3", RUNNING)]

    found = kept_nodes(NODES, ranks, RankInfo(job_id="17", restart=1), first="n1", starting=False)

    assert found == ["n1", "n3"]


@pytest.mark.parametrize("state", [RUNNING, DRAINING])
def test_one_rank_that_has_not_left_keeps_its_node(state: str) -> None:
    assert kept(rank("n2", FINISHED), rank("n2", state)) == NODES


def test_a_node_whose_ranks_have_not_begun_is_kept() -> None:
    assert kept(rank("n2", RUNNING)) == NODES


@pytest.mark.parametrize("changes", [{"job": "18"}, {"job": None}, {"restart": 0}])
def test_ranks_of_other_jobs_and_earlier_starts_say_nothing(changes: dict[str, Any]) -> None:
    assert kept(rank("n2", FINISHED, **changes)) == NODES


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """A job of three nodes, whose script runs on the first."""
    found = Programs(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("HPCTK_HOST", "n1")
    # It would be the tests' own process that ends with its parent.
    monkeypatch.setattr(processes, "die_with_parent", lambda: None)
    return found


def controller(programs: Programs, present: str, *, then: str = "") -> None:
    """A Slurm whose job 17 has the nodes ``present``; ``then`` others, once it got a list.

    As from the real one, a list with another node is refused (Slurm 22.05 to 26.05).
    """
    now = programs.root / "now"
    now.write_text(present)
    programs.add("squeue", f"printf '16 n9\\n17 n[%s]\\n' \"$(tr ' ' , <{now} | tr -d n)\"")
    update = f"""
echo "$*" >> "$0.calls"
case $* in
  "show hostnames n[1-3]") echo n1 n2 n3; exit;;
  "show hostnames "*) cat {now}; exit;;
esac
{f'echo "{then}" >{now}' if then else ":"}
for node in $(echo "${{3#NodeList=}}" | tr , ' '); do
  case " $(cat {now}) " in
    *" $node "*) ;;
    *) echo "Invalid node name specified for job 17" >&2; exit 1;;
  esac
done
echo "${{3#NodeList=}}" | tr , ' ' >{now}
"""
    programs.add("scontrol", update)


def updates(programs: Programs) -> list[str]:
    """The lists of nodes that Slurm was to leave the job."""
    head = "update JobId=17 "
    return [one.removeprefix(head) for one in programs.calls("scontrol") if one.startswith(head)]


def shrink(run: ToyRun) -> list[list[str]]:
    """The nodes that are given back each time."""
    rank = RankInfo.from_environ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"})
    return list(shrink_job(run.paths, rank, NODES, every_s=0.01))


def test_shrink_tells_slurm_which_nodes_to_keep_and_ends_with_the_last(
    programs: Programs, toy: ToyRun
) -> None:
    controller(programs, "n1 n2 n3")
    for node in NODES[1:]:
        toy.worker(f"of-{node}", host=node, job="17", restart=1).finish()

    assert shrink(toy) == [["n2", "n3"]]
    assert updates(programs) == ["NodeList=n1"]


def test_shrink_leaves_out_a_node_that_the_job_has_lost(programs: Programs, toy: ToyRun) -> None:
    controller(programs, "n1 n3")
    toy.worker("dead", host="n2", job="17", restart=1)
    toy.worker("idle", host="n3", job="17", restart=1).finish()

    assert shrink(toy) == [["n3"]]
    assert updates(programs) == ["NodeList=n1"]


def test_shrink_goes_on_when_a_node_is_lost_before_slurm_gets_the_list(
    programs: Programs, toy: ToyRun
) -> None:
    controller(programs, "n1 n2 n3", then="n1 n3")
    toy.worker("dead", host="n2", job="17", restart=1)
    toy.worker("idle", host="n3", job="17", restart=1).finish()

    assert shrink(toy) == [["n3"]]
    assert updates(programs) == ["NodeList=n1,n2", "NodeList=n1"]


def test_shrink_asks_again_when_slurm_does_not_say_which_nodes_are_left(
    programs: Programs, toy: ToyRun
) -> None:
    controller(programs, "n1 n2 n3")
    answers = (programs.root / "squeue").read_text()
    programs.add("squeue", f'[ -e "$0.asked" ] || {{ : > "$0.asked"; exit 1; }}\n{answers}')
    for node in NODES[1:]:
        toy.worker(f"of-{node}", host=node, job="17", restart=1).finish()

    assert shrink(toy) == [["n2", "n3"]]


def test_shrink_ends_where_slurm_always_refuses(programs: Programs, toy: ToyRun) -> None:
    controller(programs, "n1 n2 n3")
    programs.add("scontrol", '[ "$1" = show ] && echo n1 n2 || { echo "not now" >&2; exit 1; }')
    toy.worker("other", host="n2", job="17", restart=1).finish()

    with pytest.raises(SlurmError, match="not now"):
        shrink(toy)
