"""The timeline of a run's report with the lanes of its workers, and where their time went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby

from hpc_toolkit.report import figures
from hpc_toolkit.report.page import Cell, Section, Table, seconds
from hpc_toolkit.results import activity as states
from hpc_toolkit.results.activity import Activity, Lane, Mark, Timeline
from hpc_toolkit.results.workers import DIED, DRAINED
from hpc_toolkit.system.quantities import counted, format_duration

ZONE = f"Times are in {time.strftime('%Z')}."
_RIGHT = 24
_MOST_MARKS = 2_000
_ROWS = ((24, 22), (60, 14), (120, 9))
"""Number of lanes, and the height of a lane of at most as many."""
_LABEL = 12
"""Least distance between two labels."""
_COLOURS = {
    states.WORK: figures.COLOURS[0],
    states.RUNNING: figures.COLOURS[2],
    states.DUPLICATE: figures.COLOURS[3],
    states.FAILED: figures.COLOURS[1],
    states.LOAD: figures.COLOURS[5],
}
"""The states that are drawn, from the bottom of a lane; the rest of a life is grey."""
_SYMBOLS = {
    DIED: ("M-4-4 4 4M-4 4 4-4", figures.COLOURS[1], "worker died"),
    states.EXECUTOR: ("M-3-3 3 3M-3 3 3-3", figures.COLOURS[5], "executor died"),
    DRAINED: ("M-4-3h8l-4 7z", figures.COLOURS[3], "exited early (drained)"),
    states.REQUEUED: ("M-3-4 4 0-3 4z", figures.COLOURS[2], "started after a requeue"),
}
"""Path around the origin, colour and name of each kind of mark."""


def timeline(activity: Activity) -> Section:
    """The lives of the workers on one axis of time."""
    line = activity.timeline
    shown = counted(len(line.drawn), "lane")
    said = f"{counted(activity.workers, 'worker')} in {shown}, from {figures.moment(line.begin)}."
    deaths = activity.outcomes["deaths"]
    said += f" Recorded: {counted(deaths, 'death')} of workers or executors." if deaths else ""
    workers = gantt(said, line)._replace(
        caption=(
            "A lane shows one worker at a time, or all workers of a host if there are more than"
            " 200 lanes. It is filled by the share of each interval that its workers spent in a"
            " state; grey is the rest of their lives. Times are those of each host's clock."
        )
    )
    return Section(
        title="Timeline",
        paragraphs=(said,),
        figures=(workers,),
    )


def spent(activity: Activity) -> Section:
    """Where the time of the workers went."""
    used = {state: took for state, took in activity.seconds.items() if took > 0}
    total = max(activity.lives_s, 1e-9)
    rows = [
        (state, seconds(took, total), Cell(f"{took / total:.1%}", took / total), meaning)
        for state, meaning in states.STATES.items()
        if (took := used.get(state, 0.0))
    ]
    head = ("state", "time", "share", "meaning")
    who = counted(activity.workers, "worker")
    lives = f"{who} lived {format_duration(activity.lives_s)} in total,"
    lives += " each from its start to its last sign of life. Each second is counted once."
    return Section(
        title="Where the time of the workers went",
        paragraphs=(lives,),
        tables=(Table(title="", columns=head, rows=rows),),
    )


def gantt(said: str, timeline: Timeline) -> figures.Figure:
    """Draw the lanes below each other, grouped by host; ``said`` describes them in words."""
    lanes = timeline.drawn
    row = next((high for most, high in _ROWS if len(lanes) <= most), 6)
    span_s = timeline.end - timeline.begin
    # The lanes begin right of the names of their hosts.
    left = min(max(70.0, *(figures.text_width(lane.host) + 18 for lane in lanes), 0.0), 170.0)
    marks, hidden = _marks(lanes)
    top = 92 if marks else 66
    panel = figures.Panel(
        x=figures.Axis(0.0, span_s),
        y=figures.Axis(0.0, 1.0),
        left=left,
        top=top,
        width=figures.PAGE - left - _RIGHT,
        height=row * max(1, len(lanes)),
    )
    parts = [*_keys(lanes)]
    parts += panel.frame(figures.span_ticks(span_s), [], "time since the first worker started")
    gap = 1 if row > 6 else 0.5
    for number, lane in enumerate(lanes):
        parts += _fill(panel, timeline, lane, top + row * number + gap, row - 2 * gap)
    parts += _labels(lanes, (left, top), row)
    parts += (line for mark in marks for line in _symbol(panel, timeline, *mark, row))
    if hidden:
        parts.append(
            figures.text(left, 84, f"not drawn: {counted(hidden, 'more mark')}", colour=figures.DIM)
        )
    return figures.on_page("Workers by host", said, panel.top + panel.height + 52, parts)


def _keys(lanes: Sequence[Lane]) -> Iterator[str]:
    used = {state for lane in lanes for state in lane.spent}
    names = [(colour, state, figures.AREA) for state, colour in _COLOURS.items() if state in used]
    yield from figures.legend(
        [*names, (figures.GRID, "wait or tail", figures.AREA)], 48, figures.PAGE
    )[0]
    kinds = {kind for lane in lanes for _, kind in lane.marks}
    left = 16.0
    for kind, (_, _, name) in _SYMBOLS.items():
        if kind in kinds:
            yield _drawn(kind, left, 66)
            yield figures.text(left + 11, 70, name)
            left += 30 + 7 * len(name)


def _labels(lanes: Sequence[Lane], corner: figures.Point, row: float) -> Iterator[str]:
    """Name each host at its first lane, unless the name before is too near; separate hosts."""
    several = len({lane.host for lane in lanes}) < len(lanes)
    size, last, (left, top) = (11 if row >= _LABEL else 9), float(-_LABEL), corner
    for number, lane in enumerate(lanes):
        if number and lanes[number - 1].host == lane.host:
            continue
        below = row * number
        if several and number:
            yield figures.rule(f"M10 {top + below}H{figures.PAGE - _RIGHT}")
        if below - last >= _LABEL:
            last = below
            name, y = (
                figures.shortened(lane.host, left - 16, size),
                top + below + max(size, row / 2 + 4),
            )
            yield figures.text(left - 8, y, name, anchor="end", size=size)


def _fill(
    panel: figures.Panel, timeline: Timeline, lane: Lane, top: float, height: float
) -> Iterator[str]:
    """Stack the states of each interval; the full height is the most workers at one time."""
    full = max([timeline.width_s, *lane.lives.values()])
    said = f"{lane.host}: {counted(lane.workers, 'worker')}"
    spent = {state: sum(cells.values()) for state, cells in lane.spent.items()}
    said += "".join(f", {state} {format_duration(took)}" for state, took in spent.items() if took)
    yield f"<g><title>{figures.escaped(said)}</title>"
    bottom = dict.fromkeys(range(timeline.intervals), 0.0)
    scale = panel.width / timeline.intervals

    def area(colour: str, cells: dict[int, float]) -> str:
        """One path with a rectangle for each run of equal intervals."""
        boxes = []
        for index, number in enumerate(sorted(cells)):
            y = round(top + height * (1 - min(bottom[number] / full, 1.0)), 1)
            high = round(height * min(cells[number] / full, 1.0), 1)
            # Of neighbours, the number less the index is the same.
            boxes.append((number - index, y, high, number))
        path = ""
        for (_, y, high), some in groupby(boxes, key=lambda box: box[:3]):
            first, *rest = (number for *_, number in some)
            x, wide = panel.left + first * scale, (len(rest) + 1) * scale
            path += f"M{x:.1f} {y:g}h{wide:.1f}v-{high:g}h-{wide:.1f}z" if high else ""
        return f'<path class="{colour}" d="{path}"/>' if path else ""

    yield area(figures.GRID, lane.lives)
    for state, colour in _COLOURS.items():
        cells = lane.spent.get(state, {})
        yield area(colour, cells)
        for number, took in cells.items():
            bottom[number] += took
    yield "</g>"


def _marks(lanes: Sequence[Lane]) -> tuple[list[tuple[int, str, Mark]], int]:
    """The marks to draw, and the number of those that are too many; rare kinds come first."""
    found = [
        (number, kind, mark)
        for kind in _SYMBOLS
        for number, lane in enumerate(lanes)
        for (_, name), mark in lane.marks.items()
        if name == kind
    ]
    return found[:_MOST_MARKS], len(found[_MOST_MARKS:])


def _symbol(
    panel: figures.Panel, timeline: Timeline, lane: int, kind: str, mark: Mark, row: float
) -> Iterator[str]:
    x, _ = panel.at(mark.at - timeline.begin, 0.0)
    more = f" (and {mark.count - 1} more)" if mark.count > 1 else ""
    said = f"{format_duration(mark.at - timeline.begin)}: {mark.text}{more}"
    yield _drawn(kind, x, panel.top + row * lane + row / 2, said)


def _drawn(kind: str, x: float, y: float, said: str = "") -> str:
    path, colour, _ = _SYMBOLS[kind]
    inner = f"<title>{figures.escaped(said)}</title>" if said else ""
    halo = 'stroke="var(--paper,#fff)" stroke-width="4.5" stroke-linejoin="round"'
    place = f'd="{path}" transform="translate({x:.1f} {y:.1f})"'
    line = 'stroke="currentColor" stroke-width="2"'
    return f'<g>{inner}<path {place} {halo}/><path class="{colour}" {place} {line}/></g>'
