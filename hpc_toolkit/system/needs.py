"""What the items of a stage need, also after they ran out of it, and what a worker has."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.quantities import (
    counted,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from hpc_toolkit.system.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpc_toolkit.system.binding import Place

FEATURES, TIME = "features", "time"
_SIZES = ("memory", "gpu_memory")
_COUNTS = ("nodes", "cpus")
KNOWN = ("nodes", "gpus", "cpus", *_SIZES, TIME, FEATURES)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")
_HINT = "such as gpus=1,cpus=4,memory=40G,time=2h,features=a100,licence=1"

OOM, GPU_OOM, TIMEOUT = "oom", "gpu_oom", "timeout"
_GROWN = {OOM: "memory", GPU_OOM: "gpu_memory", TIMEOUT: TIME}
"""Why an item failed -> what it needs more of when it runs again."""
_FACTOR = re.compile(r"x([0-9]{1,3}(?:\.[0-9]{1,3})?)")
_LEAST_FACTOR, _MOST_STEPS = 1.1, 400
_RETRIES = {
    OOM: "such as on = 'oom', memory = 'x2', up_to = '200G'",
    GPU_OOM: "such as on = 'gpu_oom', gpu_memory = 'x2', up_to = '80G'",
    TIMEOUT: "such as on = 'timeout', time = 'x2', up_to = '8h'",
}

Amounts = dict[str, Any]
"""nodes, gpus, cpus and other names: numbers; memory, gpu_memory: bytes; time: seconds; features: a
list of names."""


def parse_needs(given: Any, where: str) -> Amounts:
    """Check needs, and convert texts of sizes and durations; the result is read unchanged again.

    ``where`` begins the messages. Raises ConfigError: a wrong value, or a name that is nearly one
    of :data:`KNOWN`.
    """
    found: Amounts = {}
    if not isinstance(given, Mapping):
        message = f"{where}: {given!r:.60} has no names and values"
        raise ConfigError(message, hint="such as {'gpus': 1, 'memory': '40G'}")
    for name, value in given.items():
        place = f"{where}.{name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: {name!r:.60} is not a name", hint=_HINT)
        if name not in KNOWN and any(name.replace("-", "_") in (one, one[:-1]) for one in KNOWN):
            raise ConfigError(f"{where}: unknown key {name!r}", hint=near_miss(name, list(KNOWN)))
        if name == FEATURES:
            found[name] = _features(value, place)
        elif name == TIME and isinstance(value, str):
            found[name] = parse_duration(value, where=place)
        elif name in _SIZES and isinstance(value, str):
            found[name] = parse_size(value, where=place)
        else:
            found[name] = _number(name, value, place)
    return found


def _features(value: Any, where: str) -> list[str]:
    names = value.split("+") if isinstance(value, str) else value
    good = isinstance(names, list | tuple) and all(
        isinstance(one, str) and _NAME.fullmatch(one) for one in names
    )
    if not good or not names:
        message = f"{where}: {value!r:.60} is not a list of names"
        raise ConfigError(message, hint='such as ["a100"], or a100+nvlink as text')
    return list(names)


def _number(name: str, value: Any, where: str) -> float:
    if isinstance(value, str) and name not in (*_SIZES, TIME):
        try:
            value = float(value) if "." in value else int(value)
        except ValueError:
            value = math.nan
    wanted = "a whole number from 1" if name in _COUNTS else "a number from 0"
    good = type(value) in (int, float) and 0 <= value < math.inf
    if name in _COUNTS:
        good = good and type(value) is int and value >= 1
    elif name == "gpus":
        good = good and (value < 1 or value == int(value))
        wanted = "0, a fraction below 1 or a whole number"
    elif name in (*_SIZES, TIME):
        good = good and value > 0
        wanted = "a duration such as '2h'" if name == TIME else "a size such as '40G'"
    if not good:
        raise ConfigError(f"{where}: {value!r:.60} is not {wanted}", hint=_HINT)
    return int(value) if value == int(value) and name != TIME else value


def split(text: str, where: str, hint: str = _HINT) -> dict[str, str]:
    """The names and values of ``NAME=VALUE,...``, such as the needs of an option."""
    pairs = [one.partition("=") for one in text.split(",")]
    found = {name.strip(): value.strip() for name, _, value in pairs}
    if len(found) < len(pairs) or not all(equals and value for _, equals, value in pairs):
        raise ConfigError(f"{where}: {text!r:.80} is not NAME=VALUE,..., each once", hint=hint)
    return found


class Retry(Record):
    """How the needs of an item grow each time that it ran out of memory or time (rule R18)."""

    on: str
    """:data:`OOM`, :data:`GPU_OOM` or :data:`TIMEOUT`."""
    factor: float
    step: float
    """Bytes or seconds that are added each time; 0 if the amount is multiplied."""
    base: float
    up_to: float
    needs: Amounts
    """Those of an item that did not run out of anything yet."""

    @property
    def steps(self) -> int:
        """After how many such failures the amount is ``up_to``, so that further ones count; 0 if
        these are too many."""
        return next((n for n in range(_MOST_STEPS + 1) if self._raised(n) >= self.up_to), 0)

    def _raised(self, steps: int) -> float:
        return self.base * self.factor**steps + self.step * steps

    def amount(self, steps: int) -> float:
        """Bytes of memory or seconds that an item gets after this number of such failures."""
        found = self.up_to if steps >= self.steps else self._raised(steps)
        return found if self.on == TIMEOUT else math.ceil(found)

    def grown(self, steps: int) -> Amounts:
        """What a worker must have for such an item."""
        name, least = _GROWN[self.on], self.amount(steps) if steps else 0
        return {**self.needs, name: max(least, self.needs.get(name, 0))} if steps else self.needs


def _parsed(given: Any, where: str) -> tuple[str, str, float, float, float]:
    """Why an item failed, the name of what it needs more of, factor and step, and the limit."""
    on = str(given.get("on")) if isinstance(given, dict) else ""
    name = _GROWN.get(on, "")
    if not name:
        message = f"{where}: on = {on!r:.40} is not {', '.join(map(repr, _GROWN))}"
        raise ConfigError(message, hint=" or ".join(_RETRIES.values()))
    if given.keys() != {"on", name, "up_to"}:
        message = f"{where}: it has the keys {', '.join(given)}, not on, {name} and up_to"
        raise ConfigError(message, hint=_RETRIES[on])
    more, place = str(given[name]), f"{where}.{name}"
    factor = _FACTOR.fullmatch(more)
    if not more.startswith("+") and (factor is None or float(factor[1]) < _LEAST_FACTOR):
        message = f"{place}: {given[name]!r:.40} is not a factor from x{_LEAST_FACTOR}"
        example = "+30min" if name == TIME else "+8G"
        raise ConfigError(message, hint=f"{_RETRIES[on]}; {name} = '{example}' adds that much")
    up_to = _amount(name, given["up_to"], f"{where}.up_to")
    if factor is None:
        return on, name, 1.0, _amount(name, more[1:], place), up_to
    return on, name, float(factor[1]), 0.0, up_to


def _amount(name: str, value: Any, where: str) -> float:
    if isinstance(value, str):
        value = (parse_duration if name == TIME else parse_size)(value, where=where)
    return _number(name, value, where)


def retry_of(stage: Any) -> Retry | None:
    """How the needs of the items of a stage (``StageSpec``) grow; None: they do not.

    Raises ConfigError: it is wrong, or does not fit the needs or the time limit of the stage.
    """
    if not stage.retry:
        return None
    needs = dict(stage.needs or {})
    on, name, factor, step, up_to = _parsed(stage.retry, "retry")
    base = stage.timeout_s if on == TIMEOUT else needs.get(name)
    if base is None:
        timed = on == TIMEOUT
        what, hint = ("a timeout", "90min") if timed else (f"needs with {name}", f"{name}=4G")
        message = f"retry: on = {on!r} raises {what}, which the stage does not have"
        raise ConfigError(message, hint=f"add it for the first attempt, such as {hint}")
    if base >= up_to:
        start, end = shown(name, base), shown(name, up_to)
        message = f"retry.up_to: {end} is not more than the {start} of the first attempt"
        raise ConfigError(message, hint="give a larger limit, or no retry")
    found = Retry(on=on, factor=factor, step=step, base=base, up_to=up_to, needs=needs)
    if not found.steps:
        message = f"retry.{name}: it is raised over {_MOST_STEPS} times before up_to"
        raise ConfigError(message, hint=_RETRIES[on])
    if on in stage.final:
        raise ConfigError(f"retry and no_retry both have {on!r}", hint="leave one of them out")
    return found


def needs_after(stage: Any, steps: int) -> Amounts:
    """What a worker must have for an item that ran out this number of times; {}: nothing."""
    retry = retry_of(stage) if steps else None
    return dict(stage.needs or {}) if retry is None else retry.grown(steps)


def parse_has(words: Iterable[str], where: str) -> Amounts:
    """What a worker has beside what it sees: ``licence=2``, or a feature such as ``a100``."""
    features = [word for word in words if "=" not in word]
    pairs = (word.partition("=") for word in words if "=" in word)
    named = {name: value for name, _, value in pairs}
    return parse_needs({**named, **({FEATURES: features} if features else {})}, where)


def own_resources(place: Place, given: Mapping[str, Any], ranks: int = 1) -> Amounts:
    """What this process has, one of ``ranks`` on its node; ``given`` replaces what it sees.

    ``gpu_memory`` is that of its smallest GPU, and absent if nvidia-smi does not say it.
    """
    from hpc_toolkit.system.binding import read_machine
    from hpc_toolkit.system.gpus import visible_gpus
    from hpc_toolkit.system.ranks import step_nodes

    memory = place.memory_bytes or read_machine().memory_bytes // ranks
    gpus = visible_gpus()
    found = {"nodes": step_nodes(), "gpus": len(gpus), "cpus": len(place.cpus)}
    found |= {"memory": memory, **given}
    if gpus and "gpu_memory" not in found and (size := _gpu_memory(gpus)):
        found["gpu_memory"] = size
    return found


def _gpu_memory(gpus: list[str]) -> int:
    from hpc_toolkit.system.ranks import answer

    query = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    lines = answer("nvidia-smi", *query, "-i", ",".join(gpus)).split()
    return min((int(one) for one in lines if one.isdigit()), default=0) << 20


def lacking(
    needs: Mapping[str, Any], has: Mapping[str, Any], left_s: float = math.inf
) -> list[str]:
    """The needs that a worker does not fulfil; ``left_s``: seconds until its end."""
    missing = []
    for name, value in needs.items():
        if name == FEATURES:
            enough = set(value) <= set(has.get(name, ()))
        elif name == TIME:
            enough = value <= left_s
        else:
            # 0.333 GPUs are a third, as for --gpus-per-worker.
            enough = value <= has.get(name, 0) + (1e-3 if name == "gpus" else 0)
        if not enough:
            missing.append(name)
    return missing


def shown(name: str, value: Any) -> str:
    """One need for people: "4 GPUs", "40.0 GiB of memory", "the feature a100"."""
    if name == FEATURES:
        return f"the feature{'s' * (len(value) > 1)} {', '.join(value)}"
    if name == TIME:
        return f"{format_duration(value)} of time"
    if name in _SIZES:
        return f"{format_size(int(value))} of {'GPU ' * (name == 'gpu_memory')}memory"
    if name in ("gpus", *_COUNTS):
        word = "node" if name == "nodes" else name[:-1].upper()
        return counted(value, word) if value == int(value) else f"{value:g} {word}s"
    return f"{value:g} {name}"


def unmet(needs: Mapping[str, Any], workers: Iterable[Mapping[str, Any]]) -> str:
    """Why none of these workers can hold the needs; "" if one can, or if there is no worker.

    The time of a worker is that which it had at its start.
    """
    known = [(has, has.get(TIME, math.inf)) for has in workers]
    if not known or not all(lacking(needs, *one) for one in known):
        return ""
    for name, value in needs.items():
        if all(lacking({name: value}, *one) for one in known):
            if name == FEATURES:
                return f"need {shown(name, value)}; no worker has all of that"
            most = max(has.get(name, 0) for has, _ in known)
            amount = shown(name, most) if name in (*_SIZES, TIME) else f"{most:g}"
            return f"need {shown(name, value)}; no worker has more than {amount}"
    together = ", ".join(shown(name, value) for name, value in needs.items())
    return f"need {together}; no worker has all of that"


def submit_options(needs: Mapping[str, Any]) -> str:
    """Options of ``hpctk submit`` for workers that can hold the needs; "" if none are known."""
    needs = {"gpus": 1, **needs} if "gpu_memory" in needs else needs
    written: dict[str, Callable[[Any], str]] = {
        "nodes": lambda n: f"--nodes {n} --one-rank" if n > 1 else "",
        "gpus": lambda n: f"--gpus-per-node {math.ceil(n)} --ntasks-per-node 1" if n else "",
        "cpus": lambda n: f"--cpus-per-task {n}",
        "memory": lambda n: f"--mem {math.ceil(n / 2**20)}M",
        # Slurm does not know the memory of a GPU, only its type.
        "gpu_memory": lambda _: "--gpu-type TYPE",
        # A worker must have the time after its job has started it, and before its warning.
        TIME: lambda n: f"--time {math.ceil((1.1 * n + 300) / 60)}",
    }
    if not needs.keys() <= written.keys():
        return ""
    return " ".join(filter(None, (written[name](value) for name, value in needs.items())))
