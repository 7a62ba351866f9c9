"""Parse and format durations and sizes, for people and for Slurm."""

from __future__ import annotations

import math
import re

from hpc_toolkit.errors import ConfigError

MAX_WALLTIME_S = 2**31 - 1
"""Slurm counts a time limit in a signed 32-bit number of seconds (src/common/parse_time.c)."""

MAX_SIZE_BYTES = 2**63 - 1
"""The largest file offset."""

MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86400

_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNIT_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}

# Patterns are compiled when they are used: most commands parse no quantity.
# 12 digits are far above every limit below, and keep int() from parsing megabytes of text.
_INT = "[0-9]{1,12}"
_PART = rf"({_INT}(?:\.{_INT})?) ?(ms|min|s|m|h|d)"
_PARTS = rf"{_PART}(?: ?{_PART})*"
_DAYS = rf"({_INT})-({_INT})(?::({_INT}))?(?::({_INT}))?"
_CLOCK = rf"({_INT}):({_INT}):({_INT})"
_MINUTES = rf"({_INT})(?::({_INT}))?"
_NUMBER = r"[0-9]{1,19}(?:\.[0-9]{1,12})?"
_WHOLE = f"-?{_INT}"
_SIZE = rf"(?ia)({_NUMBER}) ?(?:([KMGTP])I?B?|B)"

_DURATION_HINT = "write '90s', '90min', '4h', '2d', '1:30:00' or '1-12:00:00'"
_WALLTIME_HINT = "write '90min', '4h', '1:30:00' or '1-12:00:00'; as in sbatch, '90' is 90 minutes"
_SIZE_HINT = "write a number with K, M, G, T or P (powers of 1024), or B: '512M', '1.5G'"


def parse_duration(text: str, *, where: str = "duration", zero: bool = False) -> float:
    """Parse a duration into seconds: "90s", "1h 30min", "500ms", "1:30:00" or "1-12:00:00".

    A number without a unit is refused. ``zero`` allows 0, which needs none. ``where`` is the source
    of ``text`` for error messages: an option, or a file and key. Raises ConfigError.
    """
    total = _duration_s(text)
    if total is None:
        _refuse_bare(text, where, "s", "min", "h")
        raise ConfigError(f"{where}: {text!r} is not a duration", hint=_DURATION_HINT)
    _check_range(total, MAX_WALLTIME_S, text, where, _DURATION_HINT, zero=zero)
    return total


def parse_walltime(text: str, *, where: str = "time") -> int:
    """Parse a time option of sbatch into whole seconds.

    Reads the same as :func:`parse_duration`, and the two short forms of sbatch(1): a number is
    minutes, and "90:30" is minutes and seconds. Raises ConfigError, also for ``UNLIMITED``.
    """
    if match := re.fullmatch(_MINUTES, text):
        total: float | None = _clock_s("0", "0", *match.groups())
    else:
        total = _duration_s(text)
    if total is None:
        raise ConfigError(f"{where}: {text!r} is not a time limit", hint=_WALLTIME_HINT)
    _check_range(total, MAX_WALLTIME_S, text, where, _WALLTIME_HINT)
    return math.ceil(total)


def _duration_s(text: str) -> float | None:
    if text == "0":
        return 0.0
    if match := re.fullmatch(_DAYS, text):
        return _clock_s(*match.groups())
    if match := re.fullmatch(_CLOCK, text):
        return _clock_s("0", *match.groups())
    if re.fullmatch(_PARTS, text):
        return sum(float(number) * _UNIT_S[unit] for number, unit in re.findall(_PART, text))
    return None


def _clock_s(*fields: str | None) -> float:
    """Seconds of days, hours, minutes and seconds; missing fields are 0."""
    units = (DAY_S, HOUR_S, MINUTE_S, 1)
    return float(sum(int(field or 0) * unit for field, unit in zip(fields, units, strict=True)))


def _refuse_bare(text: str, where: str, *units: str) -> None:
    """Raise ConfigError if ``text`` is a number without a unit."""
    if re.fullmatch(_NUMBER, text):
        *others, last = (f"{text}{unit}" for unit in units)
        msg = f"{where}: {text!r} has no unit"
        raise ConfigError(msg, hint=f"write {', '.join(others)} or {last}")


def _check_range(
    number: float, most: int, text: str, where: str, hint: str, *, zero: bool = False
) -> None:
    if number > most or (number == 0 and not zero):
        raise ConfigError(f"{where}: {text!r} is {'too large' if number else 'zero'}", hint=hint)


def counted(number: int, what: str) -> str:
    """A number of things for people: "1 worker", "2,000 workers", "0 processes"."""
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{ending}"


def first_names(names: list[str] | tuple[str, ...], shown: int = 3) -> str:
    """The first names, and the number of further ones: ``a, b, c and 2 more``."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def format_walltime(seconds: int) -> str:
    """``HH:MM:SS``, or ``D-HH:MM:SS`` from one day on: what squeue(1) prints."""
    if not 0 < seconds <= MAX_WALLTIME_S:
        msg = f"time: {seconds!r} seconds are outside 1..{MAX_WALLTIME_S}"
        raise ConfigError(msg, hint="a time limit is at least one second")
    days, rest = divmod(seconds, DAY_S)
    clock = f"{rest // HOUR_S:02d}:{rest % HOUR_S // MINUTE_S:02d}:{rest % MINUTE_S:02d}"
    return f"{days}-{clock}" if days else clock


def format_seconds(seconds: int) -> str:
    """Write whole seconds for an option, in the largest unit that is exact: "5min", "90s"."""
    for unit, factor in (("h", HOUR_S), ("min", MINUTE_S)):
        if seconds % factor == 0:
            return f"{seconds // factor}{unit}"
    return f"{seconds}s"


def format_duration(seconds: float) -> str:
    """A duration for people, with two units at most: "3.2 s", "4 min 10 s", "2 h 05 min".

    Loses precision on purpose. "unknown" for nan and infinity.
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    # Round before comparing, or 59.97 would print as "60.0 s".
    if round(seconds, 3) < 1:
        text = f"{round(seconds * 1000)} ms"
    elif round(seconds, 1) < MINUTE_S:
        text = f"{seconds:.1f} s"
    elif (whole := round(seconds)) < HOUR_S:
        text = f"{whole // MINUTE_S} min {whole % MINUTE_S:02d} s"
    elif (minutes := round(seconds / MINUTE_S)) < DAY_S // MINUTE_S:
        text = f"{minutes // 60} h {minutes % 60:02d} min"
    else:
        hours = round(seconds / HOUR_S)
        text = f"{hours // 24} d {hours % 24:02d} h"
    return text


def parse_size(text: str, *, where: str = "size", zero: bool = False) -> int:
    """Parse a size into bytes: "512M", "1.5 GiB" or "100B"; K to P are powers of 1024, as in Slurm.

    A number without a unit is refused. ``zero`` allows 0, which needs none. A fraction of a byte is
    dropped. Raises ConfigError.
    """
    if match := re.fullmatch(_SIZE, text):
        number, unit = match[1], _UNIT_BYTES[(match[2] or "").upper()]
        size = int(float(number) * unit) if "." in number else int(number) * unit
    elif text == "0":
        size = 0
    else:
        _refuse_bare(text, where, "M", "G")
        raise ConfigError(f"{where}: {text!r} is not a size", hint=_SIZE_HINT)
    _check_range(size, MAX_SIZE_BYTES, text, where, _SIZE_HINT, zero=zero)
    return size


def parse_size_mib(text: str, *, where: str = "size", zero: bool = False) -> int:
    """Parse a size as :func:`parse_size` does, into MiB, rounded up."""
    return -(-parse_size(text, where=where, zero=zero) // 2**20)


def parse_mem_mib(text: str, *, where: str = "mem", zero: bool = False) -> int:
    """Parse a memory option of sbatch into MiB, rounded up; as in sbatch, a bare number is MiB.

    ``zero`` allows 0, which requests all memory of a node. Raises ConfigError.
    """
    bare = text != "0" and re.fullmatch(_INT, text)
    return parse_size_mib(f"{text}M" if bare else text, where=where, zero=zero)


def format_mem(mib: int) -> str:
    """Write ``mib`` for sbatch, in the largest unit that is exact: "480G", "1536M"."""
    for unit, factor in (("T", 2**20), ("G", 2**10)):
        if mib and mib % factor == 0:
            return f"{mib // factor}{unit}"
    return f"{mib}M" if mib else "0"


def format_size(size_bytes: int) -> str:
    """A size for people: "512 B", "1.5 GiB". Loses precision on purpose."""
    if size_bytes < 0:
        return f"-{format_size(-size_bytes)}"
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # 1023.96 KiB would print as "1024.0 KiB".
        if round(value, 1) < 2**10:
            return f"{size_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 2**10
    return f"{value:.1f} PiB"


def parse_counts(text: str, where: str, *, most: int, least: int = 1) -> tuple[int, ...]:
    """Parse a comma-separated list of whole numbers; return each once, in the order of the text.

    ``where`` is the option, for error messages. Raises ConfigError.
    """
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isdecimal() and len(word) < 10]
    if len(numbers) < len(words) or not all(least <= number <= most for number in numbers):
        msg = f"{where}: {text!r} is not a list of numbers from {least} to {most}"
        raise ConfigError(msg, hint="separate them by commas, such as 1,2,4")
    return tuple(dict.fromkeys(numbers))


def parse_range(text: str, *, where: str) -> range:
    """Parse a whole number, or ascending FIRST:LAST or FIRST:LAST:STRIDE, which includes LAST.

    Raises ConfigError; ``where`` begins its message.
    """
    where = f"{where} {text.strip()!r}"
    words = [word.strip() for word in text.split(":")]
    if len(words) > 3 or not all(re.fullmatch(_WHOLE, word) for word in words):
        msg = f"{where}: not a number, FIRST:LAST or FIRST:LAST:STRIDE"
        raise ConfigError(msg, hint="such as 3, 0:9 or 0:100:10; the last number is included")
    numbers = [int(word) for word in words]
    first, last = numbers[0], numbers[min(1, len(numbers) - 1)]
    stride = numbers[2] if len(numbers) == 3 else 1
    if stride < 1 or last < first:
        what = f"the stride is {stride}" if stride < 1 else f"{last} is before {first}"
        raise ConfigError(f"{where}: {what}", hint="write FIRST:LAST:STRIDE, ascending")
    return range(first, last + 1, stride)


def parse_cpus(text: str) -> list[int]:
    """Parse a list of CPUs in the kernel's notation, such as ``0-3,8``."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return found


def format_cpus(cpus: tuple[int, ...]) -> str:
    """Write CPUs in the kernel's notation, the reverse of :func:`parse_cpus`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)
