"""Mounts and what was proven of their locks (rule R6), and what a node shows doctor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from hpc_toolkit.doctor import node
from hpc_toolkit.doctor.filesystem import check_mount
from hpc_toolkit.doctor.sides import Side, Verdict, are_apart, side_of
from hpc_toolkit.queue.leases import Liveness
from hpc_toolkit.queue.presence import Presence, PresenceFile
from hpc_toolkit.rundir import trust
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.rundir.trust import Mount, Proof, believed, parse_mount, write_proof
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.gpus import ask_driver
from hpc_toolkit.worker.worker import Worker, WorkerOptions
from tests.fakeslurm import Programs
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun

NFS_LINE = (
    "42 25 0:45 / /scratch/my\\040lab rw,noatime shared:9 - nfs4 nas:/export/my\\040lab "
    "rw,vers=4.2,hard,local_lock=none\n"
)


def mount(kind: str, *options: str) -> Mount:
    return Mount("/scratch", kind, "nas:/export", options)


def test_a_line_of_mountinfo_gives_point_type_source_and_both_sets_of_options() -> None:
    options = ("rw", "noatime", "vers=4.2", "hard", "local_lock=none")
    found = parse_mount(NFS_LINE)

    assert found == Mount("/scratch/my lab", "nfs4", "nas:/export/my lab", options)


@pytest.mark.parametrize(
    ("kind", "value", "verdict"),
    [("nfs4", "Y", Verdict.SLOWER), ("nfs4", "N", Verdict.FINE), ("nfs", "Y", Verdict.FINE)],
)
def test_directory_delegations_of_the_nfs_client_are_found(
    kind: str, value: str, verdict: Verdict, tmp_path: Path
) -> None:
    parameters = tmp_path / "nfsv4" / "parameters"
    parameters.mkdir(parents=True)
    (parameters / "directory_delegations").write_text(f"{value}\n")

    found = check_mount(mount(kind, "hard"), tmp_path)

    assert found.verdict == verdict
    assert ("modprobe.d" in found.means) == (verdict is not Verdict.FINE)


@pytest.mark.parametrize(
    ("kind", "option", "verdict"),
    [
        *(("nfs4", one, Verdict.FINE) for one in ("hard", "actimeo=30")),
        *(("nfs", one, Verdict.SLOWER) for one in ("local_lock=all", "local_lock=posix", "nolock")),
        *(("nfs4", one, Verdict.SLOWER) for one in ("nocto", "actimeo=600")),
        *(("lustre", "localflock", Verdict.SLOWER), ("ext4", "nosymfollow", Verdict.SLOWER)),
        *(("nfs", "soft", Verdict.UNSAFE), ("ext4", "soft", Verdict.FINE)),
        *(("ext4", "ro", Verdict.UNSAFE), ("cifs", "cache=loose", Verdict.UNSAFE)),
    ],
)
def test_an_option_has_the_verdict_that_its_manual_gives_it(
    kind: str, option: str, verdict: Verdict
) -> None:
    found = check_mount(mount(kind, "rw", option))

    assert found.verdict is verdict
    assert option in found.found
    assert bool(found.means) == (verdict is not Verdict.FINE)


def test_the_worst_option_gives_the_verdict_and_all_are_named() -> None:
    found = check_mount(mount("nfs", "nolock", "soft"))

    assert found.verdict is Verdict.UNSAFE
    assert found.found == "soft, nolock"


@pytest.mark.parametrize(
    ("option", "local"),
    [("local_lock=flock", True), ("localflock", True), ("local_lock=posix", False), ("rw", False)],
)
def test_flock_is_local_where_the_options_say_so(option: str, local: bool) -> None:
    assert mount("nfs", option).locks_are_local is local


def test_two_kernels_or_two_mounts_are_apart_and_two_names_of_one_are_not(tmp_path: Path) -> None:
    def side(**changes: object) -> Side:
        return Side.from_json({**asdict(side_of(tmp_path)), **changes})

    assert are_apart(side(boot="a"), side(boot="b"))
    assert are_apart(side(device=1), side(device=2))
    assert not are_apart(side(host="a", path="/a"), side(host="b", path="/b"))


LEASE_S = 180.0
BEAT_S = 10.0


def prove(paths: RunPaths, *, proven: bool = True, **more: Any) -> None:
    side = asdict(side_of(paths.root))
    write_proof(paths.doctor, {"locks_proven": proven, "sides": [side, side], **more})


def test_a_proof_holds_until_a_later_examination_withdraws_it(paths: RunPaths) -> None:
    assert not believed(paths).locks, "nothing was examined"
    for proven in (True, False):
        prove(paths, proven=proven)
        assert believed(paths).locks is proven


@pytest.mark.parametrize(
    "here",
    [
        Mount("/x", "nfs4", "nas:/other", ("rw",)),
        Mount("/x", "lustre", "nas:/export", ("rw",)),
        Mount("/x", "nfs4", "nas:/export", ("rw", "nolock")),  # locks of its own
    ],
)
def test_a_proof_says_nothing_of_another_mount(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, here: Mount
) -> None:
    examined = Mount("/y", "nfs4", "nas:/export", ("rw",))
    side = {**asdict(side_of(paths.root)), "mount": {"kind": "nfs4", "source": "nas:/export"}}
    write_proof(paths.doctor, {"locks_proven": True, "sides": [side]})
    monkeypatch.setattr(trust, "mount_of", lambda _: examined)
    assert believed(paths).locks

    monkeypatch.setattr(trust, "mount_of", lambda _: here)

    assert not believed(paths).locks


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"format": 2, "locks_proven": true}'),
        '{"format": 1, "locks_proven": "yes", "sides": []}',
        '{"format": 1, "locks_proven": true}',
        '{"format": 1, "locks_proven": true, "sides": [{"mount": 7}]}',
        *({"troubles": [7]}, {"least_lease_s": "x"}, {"least_lease_s": 10**400}),
    ],
)
def test_a_record_that_is_damaged_proves_nothing(
    paths: RunPaths, text: str | dict[str, Any]
) -> None:
    if isinstance(text, str):
        paths.doctor.write_text(text)
    else:
        prove(paths, **text)

    assert believed(paths) == Proof()


@pytest.mark.parametrize("least_s", [float("nan"), -1.0, 3601.0])
def test_a_least_lease_that_nobody_measured_is_ignored_and_that_is_said(
    paths: RunPaths, least_s: float
) -> None:
    prove(paths, least_lease_s=least_s)

    found = believed(paths)

    assert (found.locks, found.least_lease_s) == (True, 0.0)
    assert f"least_lease_s = {least_s:g} in doctor.json is ignored" in found.said


@pytest.mark.parametrize(
    ("asked_s", "lease_s", "note"), [(20.0, 60.0, "the lease is 60 s, not 20 s"), (90.0, 90.0, "")]
)
def test_a_lease_is_at_least_twice_the_delay_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked_s: float, lease_s: float, note: str
) -> None:
    toy = ToyRun(tmp_path / "run")
    prove(toy.paths, least_lease_s=60.0)

    worker = Worker(toy.paths, toy.run.manifest, WorkerOptions(lease_s=asked_s), SystemClock())
    worker._leave("")

    assert worker._liveness.lease_s == lease_s
    assert worker._member.presence.interval_s == 10.0
    said = capsys.readouterr().err
    assert note in said
    assert bool(said) is bool(note)


@pytest.mark.parametrize(
    ("proven", "held", "seconds", "found"),
    [
        pytest.param(False, False, LEASE_S - 1, (True, ""), id="a free lock without a proof"),
        pytest.param(True, False, 1.6 * BEAT_S, (False, "lock"), id="and a missed heartbeat"),
        pytest.param(True, False, 1.4 * BEAT_S, (True, ""), id="a heartbeat in time"),
        pytest.param(True, True, LEASE_S - 1, (True, ""), id="a held lock"),
    ],
)
def test_i6_only_with_a_proof_a_free_lock_and_a_missed_heartbeat_are_a_death(
    paths: RunPaths, clock: ManualClock, proven: bool, held: bool, seconds: float, found: Any
) -> None:
    if proven:
        prove(paths)
    of: dict[str, Any] = {"host": "elsewhere", "boot": "other", "pid": 1, "rank": 0, "job": None}
    paths.worker_lock("w").touch()
    PresenceFile(paths.worker("w"), Presence(worker="w", interval_s=BEAT_S, **of))
    watching = Liveness(
        paths, clock, host="here", boot="boot", lease_s=LEASE_S, locks_proven=believed(paths).locks
    )
    with FileLock(paths.worker_lock("w")) if held else nullcontext():
        assert watching.verdict("w").alive
        clock.advance(seconds)
        verdict = watching.verdict("w")

    assert (verdict.alive, verdict.evidence) == found


CONFIG = """Configuration data as of 2026-01-01T00:00:00
ClusterName             = narwhal
SLURM_VERSION           = 22.05.8
"""
SLURM = ("sbatch", "srun", "squeue", "scontrol", "scancel")


@pytest.mark.parametrize(
    ("there", "scontrol", "verdict", "found"),
    [
        (SLURM, f"echo '{CONFIG}'", "fine", "22.05.8 of cluster narwhal answered in "),
        (SLURM, "echo 'No controller answers' >&2; exit 1", "unknown", "No controller answers"),
        (("sbatch", "scancel"), "exit 0", "unknown", "srun, squeue cannot be found"),
    ],
)
def test_slurm_tells_its_version_or_why_it_is_unknown(
    programs: Programs, there: tuple[str, ...], scontrol: str, verdict: str, found: str
) -> None:
    for name in there:
        programs.add(name, "exit 0")
    programs.add("scontrol", scontrol)

    told = node.check_slurm()

    assert (told.check, str(told.verdict)) == ("slurm", verdict)
    assert found in told.found


GIB = 2**30
GPU = {"name": "NVIDIA L40S", "total": 44 * GIB, "free": 43 * GIB}
ALL_OF_IT = "NVIDIA L40S, 44.0 GiB (43.0 GiB free)"
DRIVER = {"driver": "550.54", "cuda": 12040, "gpus": [GPU, GPU]}
TORCH = {"torch": "2.5.1", "cuda": "12.4", "gpus": [""]}


def library(count: int, lost: tuple[int, ...] = ()) -> SimpleNamespace:
    """libnvidia-ml with so many GPUs, of which some are off the bus."""

    def put(value: Any) -> Callable[..., int]:
        def call(*args: Any) -> int:
            args[-1]._obj.value = value(args[0]) if callable(value) else value
            return 0

        return call

    def words(text: bytes) -> Callable[..., int]:
        def call(*args: Any) -> int:
            args[-2].value = text
            return 0

        return call

    def memory(device: Any, told: Any) -> int:
        told._obj.total, told._obj.free = 44 * GIB, 43 * GIB
        return 15 if device.value - 1 in lost else 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlShutdown=lambda: 0,
        nvmlErrorString=lambda code: f"reason {code}".encode(),
        nvmlSystemGetDriverVersion=words(b"550.54"),
        nvmlSystemGetCudaDriverVersion_v2=put(12040),
        nvmlDeviceGetCount_v2=put(count),
        nvmlDeviceGetHandleByIndex_v2=put(lambda index: index.value + 1),
        nvmlDeviceGetName=words(b"NVIDIA L40S"),
        nvmlDeviceGetMemoryInfo=memory,
    )


def test_a_gpu_that_is_off_the_bus_is_told_with_the_drivers_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library(2, lost=(1,)))

    told = ask_driver()

    assert told is not None
    assert told["gpus"] == [GPU, {"error": "reason 15"}]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What driver and torch say; a test changes it. Neither is asked in a child."""
    told: dict[str, Any] = {"driver": DRIVER, "torch": TORCH, "asked": []}

    def answer(call: Any, _timeout_s: float) -> Any:
        name = "driver" if call is ask_driver else "torch"
        told["asked"].append(name)
        return told[name]

    monkeypatch.setattr(node, "_asked", answer)
    monkeypatch.setattr(node, "find_spec", lambda name: told.get("spec", name))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return told


def test_gpus_that_answer_and_compute_are_fine(here: dict[str, Any]) -> None:
    told = [(one["check"], one["verdict"], one["found"]) for one in node.look_at_gpus()]

    assert told == [
        ("gpus", "fine", f"2 x {ALL_OF_IT}; driver 550.54, for CUDA up to 12.4"),
        ("torch", "fine", "torch 2.5.1 for CUDA 12.4 computes on 1 GPU"),
    ]
    assert here["asked"] == ["driver", "torch"]
