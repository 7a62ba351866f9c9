"""Settings of the training that a scaling run measures, and which of them vary."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, NamedTuple

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.options import Option, spelled
from hpc_toolkit.system.quantities import parse_counts, parse_duration

VARIABLE = (*("accumulate", "batch_size", "bucket_cap_mb", "loader_workers", "seq_length"),)
"""Settings that ``--vary`` accepts, written with dashes there."""

_DECODER = re.compile(r"decoder-([0-9]{1,3})x([0-9]{1,5})")
_MOST = 10**9 - 1


def _setting(
    default: Any,
    help_text: str,
    metavar: str = "N",
    *,
    name: str = "",
    least: int = 1,
    hidden: bool = False,
) -> Any:
    """Return a field whose option is called like it, unless ``name`` is given."""
    shown = "0" if metavar == "DURATION" else default
    option = Option(name, help_text, metavar, default=shown, hidden=hidden)
    return field(default=default, metadata={"option": option, "least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one training, with the help texts of their options.

    The work per step is the same at every world size (strong scaling), or the same on every rank
    (weak scaling).
    """

    batch_size: int = _setting(8, "Samples per forward pass, of all ranks together.")
    weak: bool = _setting(
        False,
        "Use --batch-size samples per rank (weak) or in all (strong).",
        "",
        name="weak/strong",
    )
    seq_length: int = _setting(128, "Tokens per sample.")
    max_steps: int = _setting(20, "Measured steps.")
    warmup: int = _setting(5, "Steps before the measured ones.", least=0)
    repeats: int = _setting(3, "Measurements of each case.")
    model: str = _setting(
        "decoder-4x128", "decoder-LAYERSxWIDTH or a model of transformers.", "NAME"
    )
    precision: str = _setting("float32", "float32 or bf16.", "NAME")
    accumulate: int = _setting(1, "Forward passes per step.", hidden=True)
    loader_workers: int = _setting(0, "Data loader processes per rank.", least=0, hidden=True)
    bucket_cap_mb: int = _setting(25, "Size of a gradient bucket, in MiB.", hidden=True)
    sample_cost_ms: float = _setting(
        0.0, "CPU time of a sample.", "DURATION", name="sample_cost", hidden=True
    )
    threads: int = _setting(0, "Threads per rank; 0: its share of the CPUs.", least=0, hidden=True)

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata["least"]
            if type(value) is int and not least <= value <= _MOST:
                message = f"{spelled(one.name)}: {value} is outside {least}..{_MOST}"
                raise ConfigError(message, hint=f"write {least} or more")
        if not 0 <= self.sample_cost_ms <= 60_000:
            message = f"--sample-cost: {self.sample_cost_ms} ms is outside 0..60000 ms"
            raise ConfigError(message, hint="the CPU time of one sample, such as 5ms")
        if self.precision not in ("float32", "bf16"):
            message = f"--precision: {self.precision!r}"
            raise ConfigError(message, hint=near_miss(self.precision, ["float32", "bf16"]))
        self.decoder()

    def batch_per_rank(self, world_size: int, among: Sequence[int] = ()) -> int:
        """Return the samples per forward pass on one rank; ``among`` is for the error's hint.

        Raises ConfigError if the batch cannot be divided equally.
        """
        if self.weak:
            return self.batch_size
        share, left = divmod(self.batch_size, world_size)
        if left:
            message = f"--batch-size: {self.batch_size} samples do not divide among {world_size}"
            unit = math.lcm(world_size, *among)
            least = unit * -(-self.batch_size // unit)
            hint = f"use a multiple of every world size, such as {least}, or add --weak"
            raise ConfigError(message, hint=hint)
        return share

    def decoder(self) -> tuple[int, int] | None:
        """Return layers and width of our own decoder; None for a model of transformers."""
        match = _DECODER.fullmatch(self.model)
        if match is None:
            return None
        layers, width = int(match[1]), int(match[2])
        if not layers or not width or width % 32:
            message = f"--model: {self.model!r} is not a decoder"
            raise ConfigError(message, hint="layers above 0, and a width that is a multiple of 32")
        return layers, width

    def words(self) -> list[str]:
        """Return the settings as options of the measured program, without defaults."""
        found: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if value == one.default:
                continue
            if one.name == "sample_cost_ms":
                found += ["--sample-cost", f"{value:f}ms"]
            else:
                found += [spelled(one.name)] if value is True else [spelled(one.name), str(value)]
        return found


OPTIONS = tuple(
    one.metadata["option"]._replace(name=one.metadata["option"].name or one.name)
    for one in fields(Settings)
)
"""The options of the settings, for the command line and the measured program."""


def sample_cost_ms(text: str) -> float:
    """Parse ``--sample-cost``. Raises ConfigError."""
    # Rounded: 0.3 ms must be 0.3 again, because measurements are found by their settings.
    return round(1000 * parse_duration(text, where="--sample-cost", zero=True), 6)


class Variation(NamedTuple):
    name: str
    """A field of :class:`Settings`, one of :data:`VARIABLE`."""
    values: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Variation:
        """Parse ``loader-workers=1,4,8``. Raises ConfigError."""
        name, _, values = text.partition("=")
        field = name.strip().replace("-", "_")
        if field not in VARIABLE:
            message = f"--vary: {name.strip()!r} cannot vary"
            hint = near_miss(_dashed(field), [_dashed(one) for one in VARIABLE])
            raise ConfigError(message, hint=hint)
        return cls(field, parse_counts(values, f"--vary {_dashed(field)}", least=0, most=_MOST))

    @property
    def word(self) -> str:
        """The variation as ``--vary`` takes it."""
        return f"{_dashed(self.name)}={','.join(map(str, self.values))}"


class Case(NamedTuple):
    """One of the trainings that are compared at each world size."""

    settings: Settings
    variation: dict[str, int]
    """Names and values of the settings that vary; empty if none do."""


def cases(settings: Settings, variations: Sequence[Variation]) -> list[Case]:
    """Return every combination of the values that vary. Raises ConfigError."""
    names = [one.name for one in variations]
    if len(set(names)) < len(names):
        message = f"--vary: {_dashed(max(names, key=names.count))} appears twice"
        raise ConfigError(message, hint="give all of its values in one --vary")
    found = []
    for values in product(*(one.values for one in variations)):
        changed: dict[str, Any] = dict(zip(names, values, strict=True))
        found.append(Case(replace(settings, **changed), changed))
    return found


def _dashed(name: str) -> str:
    return name.replace("_", "-")
