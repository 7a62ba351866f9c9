"""Invented sites, as ``scontrol --oneliner show config | partition | node`` describes them.

A site is a directory with these outputs, or text that ``invented`` expands to them.
"""

from __future__ import annotations

import datetime as dt
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpc_toolkit.cli import render as render_command
from hpc_toolkit.cli.help import Commands
from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.slurm.clusters.draft import SlurmFacts, draft
from hpc_toolkit.slurm.controller import parse_config
from hpc_toolkit.slurm.records import parse_records, script_options

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


class Site:
    """A drafted cluster file in a directory, and what 'hpctk render' makes of requests."""

    def __init__(self, facts: Any, where: Path) -> None:
        self.text = drafted(facts)
        self.file = where / "site.toml"
        self.file.write_text(self.text, encoding="utf-8")

    def note(self, words: str) -> str:
        return self.render(words)[1]

    def edit(self, old: str, new: str) -> None:
        assert old in self.text
        self.text = self.text.replace(old, new)
        self.file.write_text(self.text, encoding="utf-8")

    def render(self, words: str) -> tuple[dict[str, str], str]:
        """The options of the script, and the note."""
        app = Commands(help="")
        render_command.register(app)
        argv = ["render", "--cluster", str(self.file), "-o", "-"]
        given = shlex.split(words)
        run = [] if "--" in given else ["--run", "runs/x"]
        done = CliRunner().invoke(app, [*argv, *run, *given])
        if done.exception is not None:
            raise done.exception
        return script_options(done.stdout), done.stderr

    def options(self, words: str) -> dict[str, str]:
        return self.render(words)[0]

    def rank(self, words: str) -> tuple[int, int]:
        """CPUs and MiB of each rank of a node."""
        found = self.options(words)
        ranks, cpus = int(found["ntasks-per-node"]), int(found.get("cpus-per-task", 1))
        if "mem" in found:
            return cpus, mib(found["mem"]) // ranks
        if "mem-per-gpu" in found:
            gpus = int(found["gpus-per-node"].rpartition(":")[2])
            return cpus, mib(found["mem-per-gpu"]) * gpus // ranks
        return cpus, mib(found["mem-per-cpu"]) * cpus

    def refusal(self, words: str) -> RenderError:
        with pytest.raises(HpcToolkitError) as caught:
            self.render(words)
        assert isinstance(caught.value, RenderError)
        return caught.value


def mib(text: str) -> int:
    return int(text[:-1]) * {"M": 1, "G": 1024, "T": 2**20}[text[-1]]


def site(where: Path, partitions: list[str], nodes: list[str], config: str = "") -> Site:
    return Site(invented("other", partitions, nodes, config), where)
