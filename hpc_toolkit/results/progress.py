"""Show a run's status to people: as one line of text or as HTML, once or kept up to date.

Every value that comes from a run is escaped, because an error message may contain anything.
"""

from __future__ import annotations

import html
import sys
from typing import TYPE_CHECKING, Any

from hpc_toolkit.system.quantities import format_duration
from hpc_toolkit.system.terminal import printable

if TYPE_CHECKING:
    from hpc_toolkit.results.status import StageCounts, Status

_ERROR_CHARS = 200


def status_line(status: Status) -> str:
    """One line: ``12 of 100 done, 1 failed, 4 workers, 3.2 items/s, about 28 s left``."""
    stages = [
        (f"{name}: " if len(status.stages) > 1 else "") + ", ".join(_counts(counts))
        for name, counts in status.stages.items()
    ]
    return "; ".join([*stages, ", ".join(_pace(status))]).rstrip("; ")


def status_html(status: Status) -> str:
    """HTML without scripts: a progress bar per stage, the pace, and why there is no progress."""
    rows = [
        f"<tr><td>{html.escape(name)}</td>"
        f'<td><progress max="{max(1, counts.total)}" value="{counts.done + counts.failed}">'
        f"</progress></td><td>{html.escape(', '.join(_counts(counts)))}</td></tr>"
        for name, counts in status.stages.items()
    ]
    notes = [", ".join(_pace(status)), status.reason, *status.warnings]
    notes += [f"{one['items']} x {str(one['error'])[:_ERROR_CHARS]}" for one in status.failures]
    lines = "".join(f"<div>{html.escape(note)}</div>" for note in notes if note)
    return f"<div><b>{html.escape(status.run)}</b><table>{''.join(rows)}</table>{lines}</div>"


def _counts(counts: StageCounts) -> list[str]:
    some = [("failed", counts.failed), ("leased", counts.leased)]
    parts = [f"{number} {word}" for word, number in some if number]
    return [f"{counts.done} of {counts.total} done", *parts]


def _pace(status: Status) -> list[str]:
    if status.complete:
        return ["complete"]
    parts = [f"{status.workers.alive} workers"]
    if status.workers.dead:
        parts.append(f"{status.workers.dead} died")
    if status.eta_s is not None:
        parts.append(f"{status.rate_per_s:.3g} items/s")
        parts.append(f"about {format_duration(status.eta_s)} left")
    return parts


class StatusDisplay:
    """Shows a changing status: in place in a notebook, line by line on stdout elsewhere."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = ("", "")

    def show(self, status: Status) -> None:
        """Show the status, unless nothing changed."""
        before, self._shown = self._shown, (status_line(status), status.reason)
        if self._shown == before:
            return
        # The kernel of a notebook, found without importing anything.
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if getattr(shell, "kernel", None) is None:
            new = [text for text, old in zip(self._shown, before, strict=True) if text != old]
            sys.stdout.writelines(f"{printable(text)}\n" for text in new if text)
            sys.stdout.flush()
            return
        from IPython.display import HTML, display

        piece = HTML(status_html(status))
        if self._handle is None:
            self._handle = display(piece, display_id=True)
        else:
            self._handle.update(piece)
