"""Executes a notebook in a new kernel, as a user who runs all cells does."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

EXAMPLE = Path(__file__).parents[1] / "examples/new/notebook/workers.ipynb"


@dataclass(frozen=True)
class Executed:
    """A notebook after all of its cells have run."""

    cells: dict[str, Any]
    """The cells by their ids."""

    def text(self, cell: str) -> str:
        """Return everything that a cell printed or returned, as text."""
        parts = []
        for output in self.cells[cell].get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(output["text"])
            elif "data" in output:
                parts.append(output["data"]["text/plain"])
        return "\n".join(parts)

    def html(self, cell: str) -> str:
        """Return everything that a cell displayed as HTML."""
        outputs = self.cells[cell].get("outputs", [])
        found = (one.get("data", {}).get("text/html") for one in outputs)
        return "\n".join(text for text in found if text)


def execute(path: Path, cwd: Path, environ: dict[str, str], *, limit_s: int = 120) -> Executed:
    """Run all cells of ``path`` in ``cwd``; raise an error of a cell."""
    notebook: Any = nbformat.read(path, as_version=4)
    # With TCP, other users could connect to the kernel. The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="nb") as sockets:
        client = NotebookClient(
            notebook,
            timeout=limit_s,
            resources={"metadata": {"path": str(cwd)}},
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/k"}),
        )
        client.execute(env=environ)
    return Executed({cell["id"]: cell for cell in notebook.cells})
