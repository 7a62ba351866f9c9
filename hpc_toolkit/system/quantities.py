"""Parse and format times and sizes in the notations of people and of Slurm."""

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
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}

# 12 digits are far above every limit below, and keep int() from parsing megabytes of text.
_INT = "[0-9]{1,12}"
_DAYS = re.compile(rf"({_INT})-({_INT})(?::({_INT}))?(?::({_INT}))?")
_CLOCK = re.compile(rf"({_INT})(?::({_INT}))?(?::({_INT}))?")
_OWN_CLOCK = re.compile(rf"(?:({_INT})-)?({_INT}):([0-5][0-9]):([0-5][0-9])")
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?(ms|min|s|m|h|d)")
_NUMBER = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,12})?) ?([KMGTP]?)(?:I?B)?", re.IGNORECASE)
_MEM = re.compile(rf"({_INT})([KMGT]?)(?:I?B)?", re.IGNORECASE)

_WALLTIME_HINT = "Slurm reads minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S: 90 minutes are '1:30:00'"
_DURATION_HINT = "write seconds ('90'), a unit ('90s', '10min', '1.5h', '2d') or 'H:MM:SS'"
_SIZE_HINT = "write bytes, or a number with K, M, G, T or P (powers of 1024): '512M', '1.5G'"
_MEM_HINT = "write a whole number with K, M, G or T (powers of 1024; M if left out): '480G'"


def parse_walltime(text: str, *, where: str = "time") -> int:
    """Parse a Slurm time limit into seconds; a bare number is minutes, as in sbatch(1).

    ``where`` is the source of ``text`` for error messages: an option, or a file and key.
    Raises ConfigError, also for zero and for words such as ``UNLIMITED``.
    """
    if match := _DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(field or 0) for field in match.groups())
    elif match := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (0, *_clock_fields(match))
    else:
        msg = f"{where}: {text!r} is not a Slurm time limit"
        raise ConfigError(msg, hint=_WALLTIME_HINT)
    total = days * DAY_S + hours * HOUR_S + minutes * MINUTE_S + seconds
    if not 0 < total <= MAX_WALLTIME_S:
        msg = f"{where}: {text!r} is {total} seconds, outside 1..{MAX_WALLTIME_S}"
        raise ConfigError(msg, hint=_WALLTIME_HINT)
    return total


def _clock_fields(match: re.Match[str]) -> tuple[int, int, int]:
    first, second, third = match.groups()
    if second is None:
        return 0, int(first), 0
    if third is None:
        return 0, int(first), int(second)
    return int(first), int(second), int(third)


def format_walltime(seconds: int) -> str:
    """``HH:MM:SS``, or ``D-HH:MM:SS`` from one day on: what squeue(1) prints."""
    if not 0 < seconds <= MAX_WALLTIME_S:
        msg = f"time: {seconds!r} seconds are outside 1..{MAX_WALLTIME_S}"
        raise ConfigError(msg, hint="a time limit is at least one second")
    days, rest = divmod(seconds, DAY_S)
    clock = f"{rest // HOUR_S:02d}:{rest % HOUR_S // MINUTE_S:02d}:{rest % MINUTE_S:02d}"
    return f"{days}-{clock}" if days else clock


def parse_duration(text: str, *, where: str = "duration", zero: bool = False) -> float:
    """Parse a duration of hpctk's own options into seconds; a bare number is seconds.

    Parts may follow each other ("1h 30min"). ``zero`` allows 0. Raises ConfigError.
    """
    total = _duration_s(text.strip())
    if total is None:
        msg = f"{where}: {text!r} is not a duration"
        raise ConfigError(msg, hint=_DURATION_HINT)
    if total > MAX_WALLTIME_S or (total == 0 and not zero):
        what = "too long" if total else "zero"
        msg = f"{where}: {text!r} is {what}"
        raise ConfigError(msg, hint=_DURATION_HINT)
    return total


def _duration_s(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    if match := _OWN_CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(field or 0) for field in match.groups())
        return float(days * DAY_S + hours * HOUR_S + minutes * MINUTE_S + seconds)
    total, end = 0.0, 0
    for match in _PART.finditer(text):
        if text[end : match.start()].strip(" "):
            return None
        total += float(match[1]) * _UNIT_S[match[2]]
        end = match.end()
    return total if end and end == len(text) else None


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


def parse_size(text: str, *, where: str = "size") -> int:
    """Parse a size into bytes; K, M, G, T, P (also with B or iB) are powers of 1024, as in Slurm.

    A fraction of a byte is dropped. Raises ConfigError, also for zero.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        msg = f"{where}: {text!r} is not a size"
        raise ConfigError(msg, hint=_SIZE_HINT)
    number, unit = match[1], _BINARY[match[2].upper()]
    size = int(float(number) * unit) if "." in number else int(number) * unit
    if not 0 < size <= MAX_SIZE_BYTES:
        msg = f"{where}: {text!r} is outside 1 byte..8 EiB"
        raise ConfigError(msg, hint=_SIZE_HINT)
    return size


def parse_mem_mib(text: str, *, where: str = "mem", zero: bool = False) -> int:
    """Parse an sbatch memory request into MiB; a bare number is MiB, K is rounded up, as in Slurm.

    ``zero`` allows 0, which requests all memory of a node. Raises ConfigError.
    """
    match = _MEM.fullmatch(text)
    if not match:
        msg = f"{where}: {text!r} is not a memory size of Slurm"
        raise ConfigError(msg, hint=_MEM_HINT)
    unit = _BINARY[match[2].upper() or "M"]
    mib = -(-int(match[1]) * unit // 2**20)
    if mib > MAX_SIZE_BYTES // 2**20 or (mib == 0 and not zero):
        msg = f"{where}: {text!r} is {'too much' if mib else 'zero'}"
        raise ConfigError(msg, hint=_MEM_HINT)
    return mib


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
