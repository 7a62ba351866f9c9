"""The rendezvous handler for torch's agent: rounds in a store that node 0 serves."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.ranks import host_name
from hpc_toolkit.training.launch import meeting
from hpc_toolkit.training.launch.meeting import Address
from hpc_toolkit.training.launch.options import all_options
from hpc_toolkit.training.launch.rounds import Rounds

if TYPE_CHECKING:
    import contextlib

    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
    from torch.distributed.launcher.api import LaunchConfig

    from hpc_toolkit.training.launch.plan import Plan


def make_handler(
    plan: Plan, config: LaunchConfig, stack: contextlib.ExitStack
) -> tuple[RendezvousHandler, Rounds | None]:
    """Return the rendezvous handler, and the rounds unless torch's own rendezvous is used."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    if plan.meeting == "torch":
        parameters = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        try:
            return get_rendezvous_handler(parameters), None
        except (ValueError, RuntimeError) as error:
            message = f"torch's rendezvous {config.rdzv_backend!r} cannot be used: {error}"
            raise ConfigError(message, hint="leave out --rdzv-backend to use hpctk's") from error
    alone = "127.0.0.1" if plan.nodes == 1 else None
    host = config.local_addr or plan.host or alone or meeting.own_host(None)
    store = _meet(plan, host, stack)

    def open_store() -> tuple[Address, object]:
        opened = _serve(0, plan.start_timeout_s)
        return Address(host, opened.port), opened

    rounds = Rounds(
        store,
        node=plan.node_rank,
        nodes=plan.nodes,
        host=host_name(),
        timeout_s=plan.start_timeout_s,
        open_store=open_store,
    )
    return _handler_class()(rounds, store, plan), rounds


def _meet(plan: Plan, host: str, stack: contextlib.ExitStack) -> Store:
    """Return the store that all nodes share and node 0 serves."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if plan.node_rank == 0:
        store = _serve(plan.port, plan.start_timeout_s)
        if plan.meeting == "directory":
            assert plan.run_dir is not None
            path = meeting.publish(plan.run_dir, plan.launch, Address(host, store.port))
            stack.callback(path.unlink, missing_ok=True)
        return store  # type: ignore[no-any-return]
    if plan.meeting == "directory":
        assert plan.run_dir is not None
        address = meeting.find(plan.run_dir, plan.launch, timeout_s=plan.start_timeout_s)
    else:
        address = Address(plan.host, plan.port)
    meeting.wait_for_listener(address, timeout_s=plan.start_timeout_s)
    limit = timedelta(seconds=plan.start_timeout_s)
    return TCPStore(address.host, address.port, None, False, limit, False)


def _serve(port: int, timeout_s: float) -> Any:
    """Serve a store from this process; with port 0 the kernel chooses a free port."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore("127.0.0.1", port, None, True, timedelta(seconds=timeout_s), False)
    except RuntimeError as error:
        message = f"cannot listen on port {port}: {str(error).splitlines()[0]}"
        option = all_options()["master_port"].spelling
        hint = f"{option} N, another one on all nodes; with --run-dir alone a free one is found"
        raise ConfigError(message, hint=hint) from error


@functools.cache
def _handler_class() -> type[Any]:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    class Handler(RendezvousHandler):
        """Rounds behind the interface that torch's agent calls."""

        def __init__(self, rounds: Rounds, store: Store, plan: Plan) -> None:
            self._rounds, self._store, self._plan = rounds, store, plan

        def get_backend(self) -> str:
            return "hpctk"

        @property
        def use_agent_store(self) -> bool:
            # The ranks meet in a store that node 0 already serves: nobody else can take its port.
            return True

        def next_rendezvous(self) -> RendezvousInfo:
            address = self._rounds.join()
            own = PrefixStore(f"round/{self._rounds.number}/torch", self._store)
            where = RendezvousStoreInfo(address.host, address.port)
            return RendezvousInfo(own, self._plan.node_rank, self._plan.nodes, where)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return int(self._rounds.wanted())

        def get_run_id(self) -> str:
            return self._plan.launch

        def shutdown(self) -> bool:
            return True

    return Handler
