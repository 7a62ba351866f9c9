"""Invented sites, as ``scontrol --oneliner show config | partition | node`` describes them.

A site is a directory with these outputs, or text that ``invented`` expands to them.
"""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

from hpc_toolkit.slurm.clusters.draft import SlurmFacts, draft
from hpc_toolkit.slurm.controller import parse_config
from hpc_toolkit.slurm.records import parse_records

HERE = Path(__file__).parent
TODAY = dt.date(2026, 11, 28)

_CONFIG = """AccountingStorageEnforce = associations,limits,qos
AccountingStorageType = accounting_storage/slurmdbd
ClusterName = {name}
MaxArraySize = 1001
SelectType = select/cons_tres
SelectTypeParameters = CR_CORE_MEMORY
SLURM_VERSION = 24.05.4
"""


def recorded(name: str) -> SlurmFacts:
    texts = [(HERE / name / one).read_text(encoding="utf-8") for one in ("config", "partition")]
    nodes = (HERE / name / "node").read_text(encoding="utf-8")
    return SlurmFacts(
        config=parse_config(texts[0]),
        partitions=parse_records(texts[1]),
        nodes=parse_records(nodes),
    )


def invented(name: str, partitions: list[str], nodes: list[str], config: str = "") -> SlurmFacts:
    """A site of lines without their constant parts; ``3*NodeName=a`` stands for three nodes."""
    lines = []
    for line in nodes:
        ((number, node, values),) = re.findall(r"^(?:(\d+)\*)?NodeName=(\w+) (.*)$", line)
        lines += [f"NodeName={node}{i} {values} State=IDLE" for i in range(int(number or 1))]
    return SlurmFacts(
        config=parse_config(_CONFIG.format(name=name) + config),
        partitions=parse_records("\n".join(f"PartitionName={one} State=UP" for one in partitions)),
        nodes=parse_records("\n".join(lines)),
    )


def drafted(facts: SlurmFacts) -> str:
    return draft("site", facts, TODAY)
