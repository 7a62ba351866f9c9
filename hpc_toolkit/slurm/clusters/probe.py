"""What the Slurm in reach says of itself; only questions are asked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_toolkit.slurm.client import ask

_ANSWER_S = 60.0
"""Ten thousand nodes are ten megabytes of text."""

_PAIR = re.compile(r"(?:^|\s)([A-Za-z][\w/:]*)=(\S*)")
_SETTING = re.compile(r"([A-Za-z][\w\[\]]*)\s+= (.*)")


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """The answers of ``scontrol show``, as text."""

    config: dict[str, str]
    """Settings by their names in slurm.conf."""
    partitions: tuple[dict[str, str], ...]
    """One record for each partition that the user may see."""
    nodes: tuple[dict[str, str], ...]
    """One record for each node that the user may see."""


def ask_slurm() -> SlurmFacts:
    """Ask the controller for its configuration, partitions and nodes.

    The plain output is read, since JSON comes with later versions, and as a plugin.

    Raises:
        SlurmError: Slurm is not installed here, or does not answer.
    """
    show = ["scontrol", "--oneliner", "show"]
    return SlurmFacts(
        config=parse_config(ask([*show, "config"], timeout_s=_ANSWER_S)),
        partitions=parse_records(ask([*show, "partition"], timeout_s=_ANSWER_S)),
        nodes=parse_records(ask([*show, "node"], timeout_s=_ANSWER_S)),
    )


def parse_config(text: str) -> dict[str, str]:
    """The settings in the output of ``scontrol show config``."""
    found = map(_SETTING.fullmatch, text.splitlines())
    return {match[1]: match[2].strip() for match in found if match}


def parse_records(text: str) -> tuple[dict[str, str], ...]:
    """One mapping for each line of ``scontrol --oneliner show partition`` or ``node``.

    A value ends at the first space. Of a key that comes twice the first counts: free text, in which
    anything may stand, comes last.
    """
    found = (_PAIR.findall(line) for line in text.splitlines())
    return tuple(dict(reversed(pairs)) for pairs in found if pairs)
