"""When the job of a scheduler other than Slurm ends: from its variables, its files or its commands.

No answer, such as that of a missing command, means that the end is unknown.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.quantities import parse_duration
from hpc_toolkit.system.schedulers import other_job

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.system.schedulers import OtherJob

_PATIENCE_S = 20.0
_TIME = r"(?:\d+[-:])*\d+"


def job_end(environ: Mapping[str, str] = os.environ) -> float | None:
    """The end of this process's job, in epoch seconds; None if it is unknown or has no limit."""
    job = other_job(environ)
    if job is None:
        return None
    found = _ENDS[job.scheduler.name](job, environ)
    return found if found is not None and found > 0 else None


def _pbs(job: OtherJob, environ: Mapping[str, str]) -> float | None:
    limit_s = _seconds(environ.get("PBS_WALLTIME", ""))
    # The file is written when the job starts.
    started = _written(environ.get("PBS_NODEFILE", ""))
    if limit_s and started:
        return started + limit_s
    text = _answer("qstat", "-f", job.number)
    left_s = _seconds(_value(text, rf"Walltime\.Remaining = ({_TIME})$"))
    if left_s is not None:
        return time.time() + left_s
    limit_s = limit_s or _seconds(_value(text, rf"Resource_List\.walltime = ({_TIME})$"))
    used_s = _seconds(_value(text, rf"resources_used\.walltime = ({_TIME})$"))
    with suppress(ValueError):
        started = time.mktime(time.strptime(_value(text, r"\bstime = (.+)$")))
    if limit_s is None:
        return None
    return started + limit_s if started else time.time() + limit_s - (used_s or 0.0)


def _lsf(job: OtherJob, _: Mapping[str, str]) -> float | None:
    name = f"{job.number}[{job.element}]" if job.element else job.number
    # Hours and minutes, and L for a limit; E is an estimate.
    text = _answer("bjobs", "-noheader", "-o", "time_left", name)
    left = re.search(r"(?m)^(\d+):(\d+) L\b", text)
    return time.time() + 3600 * int(left[1]) + 60 * int(left[2]) if left else None


def _sge(job: OtherJob, environ: Mapping[str, str]) -> float | None:
    settings = Path(environ.get("SGE_JOB_SPOOL_DIR", "/nowhere"), "config")
    text = ""
    with suppress(OSError):
        text = settings.read_text(encoding="utf-8", errors="replace")
    limit_s = _seconds(_value(text, rf"^h_rt=({_TIME})$"))
    if limit_s is None:
        limit_s = _seconds(_value(_answer("qstat", "-j", job.number), rf"\bh_rt=({_TIME})"))
    started = _written(str(settings)) or _written(environ.get("PE_HOSTFILE", ""))
    return started + limit_s if limit_s and started else None


def _flux(job: OtherJob, _: Mapping[str, str]) -> float | None:
    left_s = _seconds(_answer("flux", "job", "timeleft", job.number).strip())
    return time.time() + left_s if left_s is not None else None


_ENDS = {"pbs": _pbs, "lsf": _lsf, "sge": _sge, "flux": _flux}


def _answer(*argv: str) -> str:
    """What a scheduler's command prints; "" if there is none, or no answer in time."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_PATIENCE_S,
            env={**os.environ, "LC_ALL": "C"},
        )
        return done.stdout.decode(errors="replace")
    return ""


def _value(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _seconds(text: str) -> float | None:
    """Seconds from a number of them, or from [DAYS-]HH:MM:SS."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    with suppress(ConfigError):
        return parse_duration(text, where="time limit")
    return None


def _written(path: str) -> float | None:
    with suppress(OSError):
        return os.stat(path).st_mtime if path else None
    return None
