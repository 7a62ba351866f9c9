"""What was measured of trainings, as Markdown, and whether it is as promised."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from resultsfile import table
from trainingjobs import WHAT

if TYPE_CHECKING:
    from trainingruns import Restart

GROWERS = ("xgboost", "lightgbm")
OURS, THEIRS = "hpctk launch", "torchrun"
HANGS_S = 60.0
"""A launch that has made no step by then is taken to hang."""


def page(steps: int, rows: int, found: dict[str, Any]) -> list[str]:
    """What was found, as Markdown."""
    lines: list[str] = []
    if "losses" in found:
        lines += losses_page(steps, found["losses"])
    if "restarts" in found:
        lines += restarts_page(found["restarts"])
    if "trees" in found:
        lines += trees_page(rows, found["trees"])
    bad = missed(found)
    return [*lines, f"Targets: MISSED: {'; '.join(bad)}." if bad else "Targets: met."]


def losses_page(steps: int, found: list[dict[str, Any]]) -> list[str]:
    head = ["model", "job", "end", "requeued", "steps", "repeated", "largest difference"]
    rows = [
        [
            row.model,
            WHAT[row.name],
            row.state,
            str(row.requeues),
            str(row.steps),
            str(row.twice),
            f"{row.difference:.1e}",
        ]
        for one in found
        for row in one["jobs"]
    ]
    lines = [
        f"Losses of {steps} steps (gloo, SGD, float32, batch 8) compared with one process",
        "without Slurm, in nats; the target is 1e-5. The two undisturbed jobs of train-multi-node",
        "ran at the same time on the same nodes.",
        "",
        *table(head, rows),
        "",
    ]
    for one in found:
        restart: Restart | None = one["restart"]
        lines.append(
            f"- {one['model']}: {one['together']} steps of task-per-gpu ran while"
            f" task-per-node trained; {told(restart)}."
        )
    return [*lines, ""]


def told(restart: Restart | None) -> str:
    if restart is None:
        return "after the rank was killed, no further step was made"
    return (
        f"the next step was made {restart.seconds:.1f} s after the rank was killed; {restart.again}"
        f" steps were repeated, {restart.lost} of them older than the last checkpoint"
    )


def restarts_page(found: dict[str, list[Restart | None]]) -> list[str]:
    rows = []
    for name, restarts in found.items():
        times = [one.seconds for one in restarts if one]
        rows.append(
            [
                name,
                f"{len(times)} of {len(restarts)}",
                f"{statistics.median(times):.1f} s" if times else "",
                f"{min(times):.1f} to {max(times):.1f} s" if times else "",
                ", ".join(str(one.again) for one in restarts if one),
                str(sum(one.lost for one in restarts if one)),
            ]
        )
    ours, theirs = (median_s(found[name]) for name in (OURS, THEIRS))
    ratio = (
        f" When its training continued, torchrun took {theirs / ours:.2f} times as long."
        if ours and theirs
        else ""
    )
    head = ["launcher", "continued", "next step after, median", "range", "steps repeated"]
    return [
        "One of two ranks is killed, without Slurm, model `plain`, alternating between the",
        f"launchers. A launcher that makes no step within {HANGS_S:g} s is ended.{ratio}",
        "",
        *table([*head, "lost beyond the checkpoint"], rows),
        "",
    ]


def median_s(restarts: list[Restart | None]) -> float:
    """0 where no restart came to a step."""
    return statistics.median([one.seconds for one in restarts if one] or [0.0])


def trees_page(rows: int, found: list[dict[str, Any]]) -> list[str]:
    cells = []
    for name in GROWERS:
        mine = [one for one in found if one["library"] == name]
        base = statistics.median(one["seconds"] for one in mine if one["granted"] == 1)
        for granted in sorted({one["granted"] for one in mine}):
            some = [one for one in mine if one["granted"] == granted]
            seconds = statistics.median(one["seconds"] for one in some)
            cells.append(
                [
                    name,
                    str(granted),
                    ", ".join(sorted({str(one["threads"]) for one in some})),
                    f"{statistics.median(one['busy_cores'] for one in some):.2f}",
                    f"{seconds:.1f} s",
                    f"{base / seconds:.2f}x",
                    f"{statistics.median(one['test_error'] for one in some):.2%}",
                ]
            )
    head = [
        "library",
        "cores granted",
        "threads",
        "busy cores",
        "seconds",
        "speed-up",
        "test error",
    ]
    return [
        f"Trees trained by train-cpu, 200 rounds, {rows:,} rows, four fifths of them for training;",
        "medians of all turns. Seconds include the generation of the data; busy cores are",
        "measured while trees grow.",
        "",
        *table(head, cells),
        "",
    ]


def missed(found: dict[str, Any]) -> list[str]:
    """What was not as it is promised of trainings."""
    models = found.get("losses", [])
    killed = {f"{one['model']}, a rank killed": [one["restart"]] for one in models}
    killed[OURS] = found.get("restarts", {}).get(OURS, [])
    return [
        *(
            f"{row.model}, {WHAT[row.name]}"
            for one in models
            for row in one["jobs"]
            if not row.kept
        ),
        *(f"{one['model']}: no two at once" for one in models if not one["together"]),
        *(f"{name}: {told(one)}" for name, some in killed.items() for one in some if is_bad(one)),
        *(
            f"{one['library']}: {one['threads']} threads on {one['granted']} cores"
            for one in found.get("trees", [])
            if one["threads"] != one["granted"]
        ),
    ]


def is_bad(restart: Restart | None) -> bool:
    """A killed rank is to train again within 30 s, with all that was saved."""
    return restart is None or restart.seconds > 30.0 or restart.lost > 0
