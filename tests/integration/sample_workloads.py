"""Workloads of the tests that run real workers."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.system.processes import parent_of

Item = dict[str, Any]


def note(item: Item, *words: object) -> None:
    """Append a line to the item's trace."""
    fd = os.open(item["trace"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    finally:
        os.close(fd)


def first_time(item: Item) -> bool:
    """Whether nobody asked this of the item's ``once`` file before."""
    try:
        os.close(os.open(item["once"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def crash(item: Item) -> Item:
    """End the process as ``how`` says: always, or if there is a ``once``, the first time."""
    note(item, "start", item["id"])
    how = item.get("how")
    if how is None or ("once" in item and not first_time(item)):
        return {"id": item["id"]}
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "abort":
        os.abort()
    elif how == "exit":
        os._exit(3)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "memory":
        bytearray(1 << 62)
    return {"unreachable": True}


def hang_once(item: Item) -> Item:
    """Hang for an hour the first time, whatever signal comes."""
    note(item, "start", item["id"], os.getpid())
    if first_time(item):
        end = time.monotonic() + 3600
        while time.monotonic() < end:
            time.sleep(1)
    return {"id": item["id"], "executor": os.getpid(), "worker": parent_of(os.getppid())[0]}


def fail(item: Item) -> Item:
    """Fail, as a permanent failure if the item says so, unless the ``cure`` file is there."""
    note(item, "start", item["id"])
    time.sleep(item.get("seconds", 0))
    if "cure" in item and Path(item["cure"]).exists():
        return {"cured": True}
    if item.get("permanent"):
        message = "the weights are missing"
        raise PermanentError(message, hint="fetch them")
    message = f"item {item['id']} is ill"
    raise RuntimeError(message)


def fail_on_host(item: Item) -> Item:
    """Fail on the hosts that the item names; elsewhere take ``seconds``."""
    host = os.environ["HPCTK_HOST"]
    note(item, "start", item["id"], host)
    if host in item["sick"]:
        message = f"item {item['id']} failed on {host}"
        raise RuntimeError(message)
    while "gate" in item and not Path(item["gate"]).exists():
        time.sleep(0.01)
    time.sleep(item.get("seconds", 0))
    return {"host": host}


def fail_some(item: Item) -> Item:
    """Fail where the item says so."""
    if item.get("fail"):
        message = "told to fail"
        raise RuntimeError(message)
    return {}


def give(item: Item) -> Any:
    """Give back what an expression says, such as a NaN somewhere inside."""
    return eval(item["give"])


def speak(item: Item) -> Item:
    """Print from Python and from a child, on both streams."""
    print(f"hello from {item['id']}")
    os.system(f"echo child of {item['id']} >&2")
    if item.get("fail"):
        message = f"{item['id']} fell silent"
        raise ValueError(message)
    return {}


class Grouped:
    """Notes each load; the context is the group."""

    def load(self, group: Any) -> Any:
        self._group = group
        return {"group": group, "loads": 0}

    def run(self, context: Any, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            if context["loads"] == 0:
                note(item, "load", context["group"], os.getpid())
            context["loads"] += 1
            if "once" in item and first_time(item):
                os.abort()
            if "gate" in item:
                while not Path(item["gate"]).exists():
                    time.sleep(0.01)
            yield {"group": context["group"]}


class Picky:
    """Cannot load one of its groups."""

    def load(self, group: Any) -> Any:
        if group == "bad":
            message = "cannot load that"
            raise OSError(message)
        return group

    def run(self, context: Any, items: Iterable[Item]) -> Iterator[Item]:
        return ({"group": context} for _ in items)


class OutOfMemoryError(RuntimeError):
    """Named like torch's, which is not imported."""


class Hungry:
    """Takes ``batch`` items at once; more than ``fits`` of one run out of memory."""

    def __init__(self, *, batch: int = 8, loads: int = 8) -> None:
        self._batch = batch
        self._loads = loads

    def load(self, group: Any) -> list[int]:
        if self._batch > self._loads:
            message = f"no memory to load for {self._batch}"
            raise MemoryError(message)
        return [self._batch]

    def run(self, context: list[int], items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            note(item, "start", item["id"], context[0])
            if context[0] > item["fits"]:
                message = f"tried to allocate {context[0]} GiB"
                raise OutOfMemoryError(message)
            yield {"batch": context[0]}

    def on_oom(self, context: list[int] | None, items: list[Item]) -> Any:
        self._batch = (context[0] if context is not None else self._batch) // 2
        note(items[0], "oom", *(item["id"] for item in items))
        if context is None:
            return self._batch > 0
        return [self._batch]


class Returning:
    """Returns ``value`` for all items."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def load(self, group: Any) -> None:
        """Nothing to prepare."""

    def run(self, context: Any, items: Iterable[Item]) -> Any:
        list(items)
        return self._value


class Miscounting:
    """Takes all items at once and gives ``more`` results than it took."""

    def __init__(self, more: int = 0) -> None:
        self._more = more

    def load(self, group: Any) -> None:
        """Nothing to prepare."""

    def run(self, context: Any, items: Iterable[Item]) -> Iterator[Item]:
        taken = list(items)
        for number in range(len(taken) + self._more):
            yield {"number": number}


class Refusing:
    """Takes no item at all."""

    def load(self, group: Any) -> None:
        """Nothing to prepare."""

    def run(self, context: Any, items: Iterable[Item]) -> Iterator[Item]:
        return iter(())


class Prefetching:
    """Notes what it prefetches and loads. Where it ``waits``, each of ``groups`` groups but the
    last gives its first result when a prefetch has begun. A prefetch ends as ``how`` says; "kill":
    with its process, before any result of the items beside it."""

    def __init__(self, *, trace: str, groups: int, how: str = "", waits: bool = True) -> None:
        self._item = {"trace": trace}
        self._left = groups
        self._how = how
        self._waits = waits
        self._begun = threading.Semaphore(0)

    def prefetch(self, group: Any) -> None:
        note(self._item, "prefetch", group)
        self._begun.release()
        if self._how == "hang":
            threading.Event().wait()
        elif self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._how == "fail":
            message = f"no\nnetwork for {group}"
            raise ConnectionError(message)

    def load(self, group: Any) -> Any:
        note(self._item, "load", group)
        self._left -= 1
        return [group]

    def run(self, context: list[Any], items: Iterable[Item]) -> Iterator[Item]:
        if self._waits and self._left > 0 and len(context) == 1:
            assert self._begun.acquire(timeout=400), "nothing was prefetched"
            context.append("waited")
            self._waits = self._how != "hang"  # nothing more will be begun
        if self._how == "kill":
            for thread in threading.enumerate():
                if thread.name == "prefetch":
                    thread.join()
        for item in items:
            if "gate" in item:
                note(self._item, "held", context[0])
            while "gate" in item and not Path(item["gate"]).exists():
                time.sleep(0.01)
            yield {"group": context[0]}


class Unspeakable(Exception):  # noqa: N818 - named after what it cannot do
    """Its text cannot be read, nor its class, nor its traceback be formatted."""

    def __init__(self, how: str) -> None:
        self._how = how
        super().__init__(how)

    def __str__(self) -> Any:
        if self._how == "text":
            message = "no text"
            raise ValueError(message)
        if self._how == "exit":
            raise SystemExit(3)
        said: Any = 5 if self._how == "number" else "said"
        return said

    @property  # type: ignore[misc]  # which is what it tests
    def __class__(self) -> Any:
        if self._how == "class":
            message = "no class"
            raise ValueError(message)
        return Unspeakable


class BareError(PermanentError):
    """Lacks the attributes of its base class."""

    def __init__(self) -> None:
        """Set nothing."""


def raise_strange(item: Item) -> Item:
    """Raise the exception that the item describes."""
    error: Any = eval(item["error"])
    if type(error) is SyntaxError:
        error.filename, error.lineno, error.text, error.offset = 3, "x", 7, "y"  # type: ignore[assignment]
    raise error


def break_output(item: Item) -> Item:
    """Execute ``code``, which breaks the output; without it, print on both streams."""
    if "code" in item:
        exec(item["code"])
        return {}
    print("out of", item["id"])
    print("error of", item["id"], file=sys.stderr)
    os.system(f"echo child of {item['id']}; echo child error of {item['id']} >&2")
    return {}
