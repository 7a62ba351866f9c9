"""Pass on options of sbatch that hpctk has no option for: ``--sbatch NAME[=VALUE]``.

An option that the script sets itself is refused, also in a short form or an abbreviation that
sbatch accepts: the last of two directives would win silently.
"""

from __future__ import annotations

import re

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import check_text, refusal

_NAME = re.compile(r"[a-z][a-z0-9-]{1,39}")
_VALUE = re.compile(r".{0,1024}")

_SAME = (
    *("account", "array", "begin", "chdir", "comment", "constraint", "cpus-per-gpu"),
    *("cpus-per-task", "deadline", "dependency", "error", "exclude", "exclusive", "get-user-env"),
    *("gpu-bind", "gpus-per-node", "gres", "gres-flags", "hold", "job-name"),
    *("kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mem", "mem-per-cpu"),
    *("mem-per-gpu", "network", "nice", "nodelist", "nodes", "ntasks", "ntasks-per-gpu"),
    *("ntasks-per-node", "open-mode", "output", "oversubscribe", "partition", "prefer"),
    *("priority", "propagate", "qos", "requeue", "reservation", "segment", "signal"),
    *("spread-job", "switches", "time", "time-min", "tmp", "wckey"),
)

_OTHERS = {
    "gpus": "use --gpus-per-node",
    "gpus-per-task": "use --gpus-per-node with --isolate-gpus",
    "gpus-per-socket": "use --gpus-per-node",
    "tasks-per-node": "use --ntasks-per-node",
    "tres-per-task": "use --gpus-per-node and --cpus-per-task",
    "no-requeue": "use --no-requeue",
    "no-kill": "the script's template decides that",
    "hetjob": "one script asks for nodes of one kind",
    "packjob": "one script asks for nodes of one kind",
    "help": "it would keep sbatch from submitting",
    "usage": "it would keep sbatch from submitting",
    "version": "it would keep sbatch from submitting",
    "test-only": "it would keep sbatch from submitting: give it to sbatch itself",
    "parsable": "give it to sbatch itself",
    "quiet": "give it to sbatch itself",
    "verbose": "give it to sbatch itself",
    "wait": "give it to sbatch itself",
    "wrap": "the script is the program; see the template 'command'",
}

MANAGED = {**{name: f"use --{name}" for name in _SAME}, **_OTHERS}
"""Options of sbatch that are not passed on, and what to do instead."""


def split_passed(text: str, where: str) -> tuple[str, str | None]:
    """Split ``NAME[=VALUE]`` into name and value. Raises RenderError."""
    name, equals, value = text.partition("=")
    if not text.isprintable() or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise refusal(where, text, "NAME or NAME=VALUE, NAME being a long option of sbatch")
    if name in MANAGED:
        msg = f"{where}: {name!r} is not passed through"
        raise RenderError(msg, hint=MANAGED[name])
    longer = sorted(option for option in MANAGED if option.startswith(name))
    if longer:
        msg = f"{where}: sbatch may read {name!r} as {longer[0]!r}"
        raise RenderError(msg, hint=MANAGED[longer[0]])
    if name == "input":
        # Slurm reads this path like that of --output; a bad path fails the job without a log.
        check_text(value, "output", f"{where} input")
    return name, value if equals else None


def check_passed(texts: tuple[str, ...], where: str) -> None:
    """Raise RenderError unless all options may be passed on and none is given twice."""
    names = [split_passed(text, where)[0] for text in texts]
    for name in names:
        if names.count(name) > 1:
            msg = f"{where}: {name!r} is given twice"
            raise RenderError(msg, hint="sbatch would take the last one")
