"""Read Slurm's configuration, partitions and nodes. Changes nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_toolkit.slurm.client import ask

_ANSWER_S = 60.0
"""Seconds for an answer: ten thousand nodes are ten megabytes of text."""

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

    Reads the plain output, because JSON output needs a later version of Slurm and a plugin.

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
    """Parse the settings in the output of ``scontrol show config``."""
    found = map(_SETTING.fullmatch, text.splitlines())
    return {match[1]: match[2].strip() for match in found if match}


def parse_records(text: str) -> tuple[dict[str, str], ...]:
    """Parse each line of ``scontrol --oneliner show partition`` or ``node`` into a mapping.

    A value ends at its first space. If a key occurs twice, the first one counts: free text, which
    may contain anything, comes last.
    """
    found = (_PAIR.findall(line) for line in text.splitlines())
    return tuple(dict(reversed(pairs)) for pairs in found if pairs)
