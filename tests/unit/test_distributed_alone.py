"""The package in a process that nobody launched: all works as with one rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")


from hpc_toolkit.errors import ConfigError, HpcToolkitError  # noqa: E402
from hpc_toolkit.training import distributed  # noqa: E402 - only where torch is

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_collectives_give_copies_and_name_what_they_cannot_do() -> None:
    own = torch.tensor([1.0, 2.0], requires_grad=True)

    for found in (distributed.all_reduce(own), distributed.all_reduce(own, "average")):
        assert found.tolist() == [1.0, 2.0]
        assert not found.requires_grad
        assert found.data_ptr() != own.data_ptr()
    whole = torch.tensor([1, 2])
    with pytest.raises(HpcToolkitError, match=r"average of torch.int64"):
        distributed.all_reduce(whole, "average")
    with pytest.raises(HpcToolkitError, match="no reduction 'mean'"):
        distributed.all_reduce(whole, "mean")  # type: ignore[arg-type] # what is refused


def test_there_is_no_group_and_the_model_stays_bare() -> None:
    model = torch.nn.Linear(2, 2)

    with distributed.process_group("gloo") as info:
        wrapped = distributed.wrap_model(model)
        with distributed.accumulating(wrapped, 0, 2):
            pass
        with pytest.raises(HpcToolkitError, match="pass 2 is not one of the 2"):
            distributed.accumulating(model, 2, 2)
        assert distributed.get_distributed_info() is info
        assert not torch.distributed.is_initialized()

    assert (info.backend, info.device, info.world_size) == ("", "cpu", 1)
    assert wrapped is model
    assert distributed.unwrapped(wrapped) is model


@pytest.mark.parametrize(
    ("named", "told"), [("glo", "no backend 'glo'"), ("nccl", "torch sees none")]
)
def test_a_backend_that_cannot_be_used_is_refused(
    named: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("HPCTK_BACKEND", named)

    with pytest.raises(ConfigError, match=told), distributed.process_group():
        pass


def test_ranks_that_nobody_tells_where_to_meet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)

    with (
        pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT") as caught,
        distributed.process_group("gloo"),
    ):
        pass

    assert "hpctk launch" in caught.value.hint


def test_leaving_writes_out_what_was_printed_and_tears_nothing_down() -> None:
    code = (
        "import atexit, threading, time\n"
        "from hpc_toolkit.training.distributed import leave\n"
        "atexit.register(print, 'torn down')\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "print('said', end='')\n"
        "leave(75)\n"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert (ended.returncode, ended.stdout) == (75, b"said")
