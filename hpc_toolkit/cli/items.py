"""The command that prints lists of items."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

from hpc_toolkit.cli.arguments import switch, value
from hpc_toolkit.cli.help import LIST, Commands
from hpc_toolkit.science.workloads.pythia import (
    HUB,
    SIZES,
    parse_sizes,
    parse_steps,
    pythia_items,
    suspects,
)

if TYPE_CHECKING:
    import typer


def register(app: typer.Typer) -> None:
    group = Commands(
        help="""Print lists of items for 'hpctk init --items -'.

        Examples:
            hpctk items pythia --sizes 14m,70m --steps 0:143000 > items.jsonl
        """
    )
    group.command("pythia")(pythia)
    app.add_typer(group, name="items", rich_help_panel=LIST, hidden=True)


def pythia(
    sizes: Annotated[
        str, value("14m,70m,...", f"Model sizes: all, or some of {', '.join(SIZES)}.")
    ],
    steps: Annotated[
        str, value("STEPS", "all, or steps, FIRST:LAST (all checkpoints) and FIRST:LAST:STRIDE.")
    ],
    layers: Annotated[
        str, value("LAYERS", "blocks (1 to L), all (with 0, the embeddings), last, or 0,4:12:4.")
    ] = "blocks",
    deduped: Annotated[bool, switch("--deduped", "Use the deduplicated models.")] = False,
    checkpoint: Annotated[str, value("NAME", "Format of checkpoint names.")] = HUB,
) -> None:
    """Print an item for each layer of each checkpoint of Pythia models.

    Examples:
        hpctk items pythia --sizes 14m,70m --steps 0,1000:143000:1000 > items.jsonl
        hpctk items pythia --sizes 14m --steps all --layers last > items.jsonl
    """
    chosen_sizes, chosen_steps = parse_sizes(sizes), parse_steps(steps)
    items = pythia_items(chosen_sizes, chosen_steps, layers, deduped=deduped, checkpoint=checkpoint)
    sys.stdout.writelines(f"{json.dumps(item)}\n" for item in items)
    sys.stdout.flush()  # warnings follow the items also where both go to one pipe
    if not deduped:
        for line in suspects(chosen_sizes, chosen_steps):
            print(f"warning: {line}", file=sys.stderr)
