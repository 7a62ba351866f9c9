"""What Slurm's programs print becomes records; what they do not print stays unknown."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

import pytest

from hpc_toolkit.slurm import client as slurm
from hpc_toolkit.slurm.controller import Accepted, sbatch, sbatch_argv
from hpc_toolkit.slurm.records import (
    UNKNOWN,
    JobRecord,
    by_id,
    job_id,
    parse_exit,
    parse_job_id,
    parse_nodes,
    parse_sacct,
    parse_squeue,
)
from tests.fakeslurm import Programs, squeue_line
from tests.integration.realrun import lives, wait_until

PENDING = squeue_line(
    State="PENDING",
    RestartCnt="2",
    SubmitTime="1795250914",
    StartTime="1795260000",
    EndTime="1795261800",
    Reason="Priority",
    NodeList="",
    Name="a b|c",
    exit_code="0",
)

# Slurm 22.05.8, 'sacct --parsable2 --noheader --allocations --duplicates' with SACCT_FIELDS.
SACCT = """\
10|10|COMPLETED|0:0|1795250914|1795250915|1795250918|n[1-4]|me|lab|bench
11|11|CANCELLED by 1000|0:0|1795250914|Unknown|1795250999|None assigned|me|lab|bench
12|12|REQUEUED|0:0|1795250914|1795250915|1795250920|n1|me|lab|bench
12|12|NODE_FAIL|1:0|1795250920|1795250926|1795250940|n2|me|lab|bench
12|12|TIMEOUT|0:15|1795250940|1795250946|1795251000|n2|me|lab|a|b
14|13_1|OUT_OF_MEMORY|0:125|1795250914|1795250915|1795250918|n1|me|lab|array
13|13_2|COMPLETED|0:0|1795250914|1795250915|1795250918|n1|me|lab|array
"""

NODES = """\
NodeName=n1 Arch=x86_64 CPUAlloc=0 OS=Linux 6.1 State=IDLE ThreadsPerCore=1 BootTime=1795239085 \
SlurmdStartTime=1795250912
NodeName=n2 CPUAlloc=0 State=DOWN*+DRAIN+DYNAMIC_NORM ThreadsPerCore=1 BootTime=None \
Reason=bad disk |x [root@2026-11-21T08:50:29]
NodeName=n3 CPUAlloc=4 State=MIXED+NOT_RESPONDING BootTime=1795239085 Reason=x Comment=y
Node n99 not found
"""


def test_a_pending_job_has_its_reason_and_expected_start() -> None:
    (record,) = parse_squeue(PENDING.encode())

    assert record == JobRecord(
        id="7",
        raw="7",
        state="PENDING",
        reason="Priority",
        restarts=2,
        submitted=1795250914.0,
        start=1795260000.0,
        end=1795261800.0,
        name="a b|c",
    )
    assert (record.waiting, record.running, record.ended) == (True, False, False)


def test_a_node_list_that_squeue_cut_is_no_node_list() -> None:
    nodes = ",".join(f"n{number}" for number in range(1000))

    assert parse_squeue(squeue_line(NodeList=nodes).encode())[0].nodes == ""
    assert parse_squeue(squeue_line(NodeList="n[1-4]").encode())[0].nodes == "n[1-4]"


@pytest.mark.parametrize("name", ["tr\u00e4ume", "\u6a21\u578b", "a\rb\x0bc"])
def test_a_name_that_is_no_ascii_shifts_no_column(name: str) -> None:
    line = squeue_line(Name=name, UserName="eve", Cluster="alpha")

    (record,) = parse_squeue(line.encode())

    assert (record.name, record.user, record.cluster) == (name, "eve", "alpha")


def test_of_a_name_and_a_reason_that_squeue_cut_the_beginning_is_told() -> None:
    words = "ReqNodeNotAvail, UnavailableNodes:" + ",".join(f"gn[{n}-{n + 3}]" for n in range(99))
    line = squeue_line(Reason=words, Name="x" + "\u00e4" * 200, UserName="eve")

    (record,) = parse_squeue(line.encode("utf-8", "surrogateescape"))

    assert record.reason == words[:256]
    assert record.name == "x" + "\u00e4" * 127, "the letter in the middle of which it was cut"
    assert record.user == "eve"


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("PENDING", "waiting"),
        ("REQUEUE_HOLD", "waiting"),
        ("RUNNING", "running"),
        ("COMPLETING", "running"),
        ("COMPLETED", "ended"),
        ("NODE_FAIL", "ended"),
        ("CANCELLED", "ended"),
        # The sibling of a federated job may run elsewhere; a word of a future Slurm may mean
        # anything; and of an unknown job nothing is known.
        ("REVOKED", ""),
        ("TELEPORTED", ""),
        (UNKNOWN, ""),
    ],
)
def test_a_state_is_ended_waiting_running_or_none_of_them(state: str, kind: str) -> None:
    record = JobRecord(id="1", state=state)

    found = {"waiting": record.waiting, "running": record.running, "ended": record.ended}
    assert [name for name, value in found.items() if value] == ([kind] if kind else [])


def test_the_accounting_gives_the_last_run_of_a_job_and_how_many_were_before() -> None:
    found = {record.id: record for record in parse_sacct(SACCT)}

    assert found["10"].state == "COMPLETED"
    assert (found["10"].nodes, found["10"].restarts, found["10"].exit_code) == ("n[1-4]", 0, 0)
    assert (found["11"].state, found["11"].nodes, found["11"].start) == ("CANCELLED", "", None)
    assert (found["12"].state, found["12"].restarts, found["12"].name) == ("TIMEOUT", 2, "a|b")
    assert found["12"].exit_code == 128 + 15
    assert (found["10"].user, found["10"].cluster) == ("me", "lab")


def test_the_accounting_tells_which_nodes_failed_under_earlier_runs() -> None:
    found = by_id(parse_sacct(SACCT), ["10", "12"])

    assert found["10"].lost == ()
    assert [(run.nodes, run.end) for run in found["12"].lost] == [("n2", 1795250940.0)]


def test_an_array_is_as_alive_as_its_liveliest_element() -> None:
    states = {1: "COMPLETED", 2: "RUNNING", 3: "PENDING", 4: "PENDING", 5: "FAILED"}
    rows = parse_squeue(
        "\n".join(
            squeue_line(JobID=f"{40 - n}", ArrayJobID="35", JobArrayID=f"35_{n}", State=state)
            for n, state in states.items()
        ).encode()
    )

    found = by_id(rows, ["35", "35_5", "37", "36_1"])

    assert found["35"].state == "RUNNING"
    assert dict(found["35"].elements) == {"COMPLETED": 1, "RUNNING": 1, "PENDING": 2, "FAILED": 1}
    assert (found["35_5"].state, found["35_5"].raw, found["35_5"].array) == ("FAILED", "35", "35")
    assert (found["37"].state, found["37"].id, found["37"].elements) == ("PENDING", "37", ())
    assert "36_1" not in found


def test_nodes_have_a_state_flags_and_a_reason() -> None:
    found = parse_nodes(NODES)

    assert set(found) == {"n1", "n2", "n3"}
    assert (found["n1"].state, found["n1"].failed) == ("IDLE", False)
    assert found["n2"].flags == {"NOT_RESPONDING", "DRAIN", "DYNAMIC_NORM"}
    assert (found["n2"].state, found["n2"].failed) == ("DOWN", True)
    assert (found["n3"].state, found["n3"].failed) == ("MIXED", True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("123\n", ("123", "")),
        ("123;alpha\n", ("123", "alpha")),
        ("You have 500 hours left.\n2026\nSubmitted!\n123;alpha\nBye 4\n", ("123", "alpha")),
        ("sbatch: Verify job submission ...\n", None),
        ("Submitted batch job 123\n", None),
        ("", None),
    ],
)
def test_the_job_id_is_the_last_line_of_its_form(text: str, found: tuple[str, str] | None) -> None:
    assert parse_job_id(text) == found


@pytest.mark.parametrize(
    ("text", "code"),
    [("0", 0), ("768", 3), ("15", 143), ("3:0", 3), ("0:9", 137), ("N/A", None), ("", None)],
)
def test_exit_codes_come_in_two_forms(text: str, code: int | None) -> None:
    assert parse_exit(text) == code


@pytest.mark.parametrize("text", ["", "0", "--all", "1_", "1,2", "1_2_3", "1\n"])
def test_what_is_no_job_id_is_none(text: str) -> None:
    assert not job_id(text)
    assert all(job_id(good) for good in ("1", "123_4", "123+1"))


def test_the_accounting_is_asked_for_what_the_queue_forgot(programs: Programs) -> None:
    programs.answer("squeue", PENDING)
    programs.answer("sacct", SACCT)

    found = slurm.job_states(["7", "10", "99"])

    assert [record.state for record in found.values()] == ["PENDING", "COMPLETED", UNKNOWN]
    assert "neither" in found["99"].reason
    (call,) = programs.calls("sacct")
    assert " --jobs=10,99" in call
    assert "--duplicates" in call


def test_the_accounting_is_searched_from_the_submission_or_a_month_back(programs: Programs) -> None:
    programs.answer("sacct", SACCT)
    day_before = datetime.fromtimestamp(1795250914 - 86400).astimezone().strftime("%FT%T")

    slurm.sacct(["10"])
    slurm.sacct(["10"], since=1795250914.0)

    bounded, known = programs.calls("sacct")
    assert " --starttime=now-30days " in bounded
    # Clocks differ, and so do time zones.
    assert f" --starttime={day_before} " in known


def test_a_slurm_that_hangs_costs_the_time_given_and_no_more(programs: Programs) -> None:
    # A site's wrapper: what it started keeps the pipe open after the wrapper was killed.
    programs.add("squeue", "sleep 3600 & echo $! > $0.child; sleep 3600")
    programs.answer("sacct", SACCT)

    found = slurm.job_states(["10"], timeout_s=0.3)
    if not (programs.root / "squeue.child").exists():
        # On a busy machine the wrapper was killed before it started anything.
        found = slurm.job_states(["10"], timeout_s=30.0)

    assert found["10"].state == UNKNOWN
    assert "squeue did not answer" in found["10"].reason
    child = int((programs.root / "squeue.child").read_text())
    wait_until(lambda: not lives(child), "the wrapper's child to end")


def test_thousands_of_jobs_are_asked_for_and_cancelled_in_pieces(programs: Programs) -> None:
    programs.answer("squeue", squeue_line(JobID="9", ArrayJobID="7", JobArrayID="7_2500"))
    programs.answer("scancel", "")
    ids = [f"7_{n}" for n in range(2501)]

    assert set(slurm.squeue(ids)) == {"7_2500"}
    slurm.scancel(ids)

    assert [call.count("7_") for call in programs.calls("squeue")] == [1000, 1000, 501]
    assert [call.count("7_") for call in programs.calls("scancel")] == [1000, 1000, 501]


def test_the_users_own_columns_and_language_do_not_reach_the_programs(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SQUEUE_FORMAT", "SACCT_FORMAT", "SQUEUE_STATES"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    programs.add("squeue", "env")

    said = slurm.run(["squeue"], timeout_s=5).stdout

    assert "SQUEUE_" not in said
    assert "SACCT_" not in said
    assert {"LC_ALL=C", "SLURM_TIME_FORMAT=%s", "SLURM_CONF=/etc/other.conf"} <= set(
        said.splitlines()
    )


BUSY = (
    "Socket timed out on send/recv operation",
    "Unable to contact slurm controller (connect failure)",
    "Unable to contact slurm controller (receive failure)",
    "Unexpected message received",
    "Zero Bytes were transmitted or received",
    "Resource temporarily unavailable",
    "Unable to create job record, try again",
    "Slurm backup controller in standby mode",
)
# Each word of TRIES is a call: refused, lost after the job was queued, or accepted. The queue is a
# file with the numbers and comments of jobs.
QUEUE = """\
n=$(( $(cat "$0.count" 2>/dev/null || echo 0) + 1 )); echo $n > "$0.count"
echo "$*" >> "$0.calls"
how=$(echo "$TRIES" | { read -r line; set -- $line; shift $((n - 1)); echo "${1:-refused}"; })
for word in "$@"; do case $word in --comment=*) comment=${word#--comment=} ;; esac; done
[ $how = refused ] || echo "10$n $comment" >> "${0%/*}/queue"
[ $how = accepted ] && { echo "10$n"; exit; }
echo "sbatch: error: Batch job submission failed: $SAID" >&2; exit 1
"""
LIST = 'echo "ARRAY_JOB_ID COMMENT"; cat "${0%/*}/queue" 2>/dev/null || true'


Submit = Callable[..., Accepted]


@pytest.fixture
def submit(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Sends a script to an sbatch of these tries."""

    def sent(tries: str, script: str, *, said: str = BUSY[0], squeue: str = LIST) -> Accepted:
        programs.add("sbatch", QUEUE)
        programs.add("squeue", squeue)
        monkeypatch.setattr(slurm, "_FIRST_PAUSE_S", 0.001)
        monkeypatch.setenv("TRIES", tries)
        monkeypatch.setenv("SAID", said)
        return sbatch(sbatch_argv(programs.root / "x.sbatch"), script)

    return sent


@pytest.mark.parametrize(
    ("tries", "job", "calls", "said"),
    [
        ("refused refused accepted", "103", 3, BUSY[0]),
        ("lost", "101", 1, BUSY[0]),
        *(("refused lost", "102", 2, said) for said in BUSY),
    ],
)
def test_a_job_is_submitted_once_while_slurm_is_busy(
    programs: Programs, submit: Submit, tries: str, job: str, calls: int, said: str
) -> None:
    accepted = submit(tries, "#SBATCH --comment='of project 7'\n", said=said)

    assert (accepted.job, len(programs.calls("sbatch"))) == (job, calls)
    (line,) = (programs.root / "queue").read_text().splitlines()
    assert re.fullmatch(rf"{job} of project 7 hpctk:[0-9a-f]{{12}}", line)


@pytest.mark.parametrize(
    ("variable", "script", "cluster"),
    [
        ("SBATCH_CLUSTERS", "#SBATCH --clusters=b\n", "a"),
        ("SLURM_CLUSTERS", "", "a"),
        ("", "#SBATCH -M b\n", "b"),
    ],
)
def test_a_job_whose_answer_was_lost_is_looked_for_on_its_cluster(
    programs: Programs,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    script: str,
    cluster: str,
) -> None:
    if variable:
        monkeypatch.setenv(variable, "a")

    listed = f'echo "$*" >> "$0.calls"; echo "CLUSTER: {cluster}"; {LIST}'
    accepted = submit("lost", script, squeue=listed)

    assert (accepted.job, accepted.cluster) == ("101", cluster)
    assert f"--clusters={cluster} " in programs.calls("squeue")[0]


def test_a_try_that_slurm_accepts_late_is_cancelled(programs: Programs, submit: Submit) -> None:
    programs.answer("scancel", "")
    # The controller answers squeue before it has processed the first try.
    late = f'echo >> "$0.n"; [ $(wc -l < "$0.n") -gt 2 ] || exit 0; {LIST}'

    assert submit("lost accepted", "", squeue=late).job == "102"
    assert programs.calls("scancel") == ["101"]
