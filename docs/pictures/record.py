# /// script
# requires-python = ">=3.11"
# dependencies = ["pyte>=0.8"]
# ///
"""Record a session in a real terminal as an animated SVG: ``uv run docs/pictures/record.py``.

Bash runs in a pseudo-terminal with ``hpctk`` on PATH, in an empty directory. Nothing is edited: the
picture has what the terminal showed, with pauses cut to two seconds.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from copy import deepcopy
from itertools import groupby
from pathlib import Path

import pyte

HERE = Path(__file__).parent
COLUMNS, ROWS = 80, 17
CELL_W, CELL_H, FONT, MARGIN = 8.4, 19.0, 14, 12
LONGEST_S, AT_END_S, KEY_S = 2.0, 5.0, 0.06
BEGIN_S = 4  # the first picture has a command
BACKGROUND, FOREGROUND = "#1b1d23", "#d8dae0"
COLORS = {
    "black": "#5c6370", "red": "#ef7a85", "green": "#98c379", "brown": "#e5c07b",
    "blue": "#6cb4f5", "magenta": "#c8a0e8", "cyan": "#5cc6d0", "white": "#d8dae0",
}  # fmt: skip
CODE = """import random
import statistics
import time


def iterate(item):
    draw = random.Random(item["seed"])
    time.sleep(draw.uniform(0.5, 1.5))
    return {"mean": statistics.fmean(draw.gauss(0, 1) for _ in range(1000))}
"""
# What is typed, and for how many seconds to wait after it; "prompt": until the next prompt.
SESSION: list[tuple[str, float | str]] = [
    ("hpctk init runs/bench --workload bench:iterate --count 100 --key seed\n", "prompt"),
    ("hpctk work --workers 4 2>work.log &\n", 4.0),
    ("hpctk status --watch\n", 5.0),
    ("q", "prompt"),
    ("pkill -9 -f 'hpctk work'    # all of its processes\n", "prompt"),
    ("hpctk status\n", "prompt"),
    ("hpctk work --workers 4             # continue\n", "prompt"),
    ("hpctk gather -o results.csv\n", "prompt"),
    ("tail -n +2 results.csv | sort -u | wc -l\n", "prompt"),
]
PROMPT = "$ "

Row = tuple[tuple[str, str, bool], ...]
"""Runs of characters of one colour: text, colour, bold."""


class Terminal(pyte.Screen):
    """pyte's terminal does not have the second screen that full-screen programs use."""

    def set_mode(self, *modes: int, **how: bool) -> None:
        if how.get("private") and 1049 in modes:
            self._kept = deepcopy(self.buffer), deepcopy(self.cursor)
            self.erase_in_display(2)
        super().set_mode(*modes, **how)

    def reset_mode(self, *modes: int, **how: bool) -> None:
        super().reset_mode(*modes, **how)
        if how.get("private") and 1049 in modes:
            self.buffer, self.cursor = self._kept


class Recorder:
    """A terminal, and what it showed when."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._screen = Terminal(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.frames: list[tuple[float, tuple[Row, ...]]] = []

    def watch(self, seconds: float, *, prompt: bool = False) -> None:
        """Read until this time is over, or until the cursor is behind a prompt."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self._fd], [], [], min(left, 0.05))
            if ready:
                self._stream.feed(os.read(self._fd, 65536))
            self._note()
            if prompt and not ready and self._at_prompt():
                return

    def type(self, text: str) -> None:
        for key in text:
            os.write(self._fd, key.encode())
            self.watch(KEY_S)

    def _at_prompt(self) -> bool:
        cursor = self._screen.cursor
        return cursor.x == len(PROMPT) and self._screen.display[cursor.y].startswith(PROMPT)

    def _note(self) -> None:
        shown = tuple(self._row(number) for number in range(ROWS))
        if not self.frames or self.frames[-1][1] != shown:
            self.frames.append((time.monotonic(), shown))

    def _row(self, number: int) -> Row:
        cells = self._screen.buffer[number]
        styled = ((cells[at].data, _color(cells[at]), cells[at].bold) for at in range(COLUMNS))
        runs = groupby(styled, key=lambda cell: cell[1:])
        row = tuple(("".join(cell[0] for cell in cells), *style) for style, cells in runs)
        return () if not any(text.strip() for text, *_ in row) else row


def _color(cell: pyte.screens.Char) -> str:
    color = cell.bg if cell.reverse and cell.bg != "default" else cell.fg
    return COLORS.get(color, FOREGROUND if color == "default" else f"#{color}")


def record() -> list[tuple[float, tuple[Row, ...]]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bench.py").write_text(CODE)
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environ = {
            "HOME": folder, "PATH": os.environ["PATH"], "TERM": "xterm-256color", "PS1": PROMPT,
            "LANG": "C.UTF-8",
        }  # fmt: skip
        shell = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--norc", "--noprofile"], cwd=folder, env=environ,
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        recorder = Recorder(ours)
        recorder.watch(10, prompt=True)
        for text, then in SESSION:
            recorder.type(text)
            recorder.watch(120 if then == "prompt" else float(then), prompt=then == "prompt")
            recorder.watch(0.8)
        os.close(ours)
        shell.wait(timeout=10)
        return recorder.frames


def drawn(frames: list[tuple[float, tuple[Row, ...]]]) -> str:
    """An SVG whose frames stand side by side, and which moves from one to the next."""
    starts, total = [], 0.0
    for (begin, _), (after, _) in zip(frames, [*frames[1:], (frames[-1][0] + 99, ())], strict=True):
        starts.append(total)
        total += AT_END_S if after - begin >= 99 else min(after - begin, LONGEST_S)
    width, height = COLUMNS * CELL_W + 2 * MARGIN, ROWS * CELL_H + 2 * MARGIN
    rows: dict[Row, str] = {}
    for _, frame in frames:
        for row in frame:
            if row:
                rows.setdefault(row, f"r{len(rows)}")
    defs = "".join(f'<g id="{name}">{_text(row)}</g>' for row, name in rows.items())
    shown = "".join(
        f'<g transform="translate({number * width:g})">'
        + "".join(
            f'<use href="#{rows[row]}" y="{at * CELL_H:g}"/>' for at, row in enumerate(frame) if row
        )
        + "</g>"
        for number, (_, frame) in enumerate(frames)
    )
    steps = "".join(
        f"{100 * start / total:.3f}%{{transform:translateX({-number * width:g}px)}}"
        for number, start in enumerate(starts)
    )
    last = -(len(frames) - 1) * width
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" \
width="{width:g}" height="{height:g}" role="img" aria-label="A terminal: a run of 60 items loses \
all of its workers by kill -9, and a second hpctk work completes it">
<style>
text{{font:{FONT}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;\
white-space:pre;dominant-baseline:central}}
.strip{{animation:play {total:.1f}s step-end -{BEGIN_S}s infinite}}
@keyframes play{{{steps}100%{{transform:translateX({last:g}px)}}}}
@media (prefers-reduced-motion){{.strip{{animation:none;transform:translateX({last:g}px)}}}}
</style>
<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>
<defs>{defs}</defs>
<svg x="{MARGIN}" y="{MARGIN}" width="{width - 2 * MARGIN:g}" height="{height - 2 * MARGIN:g}">\
<g class="strip">{shown}</g></svg>
</svg>
"""


def _text(row: Row) -> str:
    found, column = "", 0
    for text, color, bold in row:
        kept = text.rstrip() if column + len(text) == COLUMNS else text
        if kept.strip():
            x, length = column * CELL_W, len(kept) * CELL_W
            weight = ' font-weight="bold"' if bold else ""
            found += (
                f'<text x="{x:g}" y="{CELL_H / 2:g}" textLength="{length:g}" fill="{color}"'
                f"{weight}>{html.escape(kept)}</text>"
            )
        column += len(text)
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "recording.svg"
    target.write_text(drawn(record()))
    print(target)
