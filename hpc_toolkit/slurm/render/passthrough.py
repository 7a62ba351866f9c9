"""The options of sbatch behind ``--sbatch NAME[=VALUE]``: fields of a request, or passed on.

An option that the script sets itself is not passed on, also in a short form or an abbreviation
that sbatch accepts: the last of two directives would win silently.
"""

from __future__ import annotations

import re

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import check_text, refusal

_NAME = re.compile(r"[a-z][a-z0-9-]{1,39}")
_VALUE = re.compile(r".{0,1024}")

_NAMED = (
    *("account", "array", "cpus-per-task", "dependency", "gpus-per-node", "job-name", "mem"),
    *("nodes", "ntasks-per-node", "output", "partition", "qos", "requeue", "time"),
)

FIELDS = (
    *("begin", "chdir", "comment", "constraint", "cpus-per-gpu", "deadline", "error", "exclude"),
    *("exclusive", "get-user-env", "gpu-bind", "gres", "gres-flags", "hold"),
    *("kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mem-per-cpu", "mem-per-gpu"),
    *("network", "nice", "nodelist", "ntasks", "ntasks-per-gpu", "open-mode", "oversubscribe"),
    *("prefer", "priority", "propagate", "reservation", "segment", "signal", "spread-job"),
    *("switches", "time-min", "tmp", "wckey"),
)
"""Names that set the field of ``ScriptSpec`` with this name, in underscores, and are checked."""

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

MANAGED = {
    **{name: f"use --{name}" for name in _NAMED},
    **{name: f"use --sbatch {name}" for name in FIELDS},
    **_OTHERS,
}
"""Options of sbatch that are not passed on, and what to do instead."""


def split_passed(text: str, where: str) -> tuple[str, str | None]:
    """Split ``NAME[=VALUE]`` into name and value. Raises RenderError."""
    name, equals, value = text.partition("=")
    if not text.isprintable() or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise refusal(where, text, "NAME or NAME=VALUE, NAME being a long option of sbatch")
    if name in MANAGED:
        msg = f"{where}: {name!r} is not passed through"
        field = f"ScriptSpec has the field {name.replace('-', '_')}"
        raise RenderError(msg, hint=field if name in FIELDS else MANAGED[name])
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
