"""Compare a script with the script that would be rendered today, and explain differences."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit import __version__
from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.file import Header, origin, read_header, read_script
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import read_spec

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    file: str
    reasons: tuple[str, ...]
    """Why the texts differ; empty for a file that is up to date."""
    script: str
    rendered: str | None
    """The current rendering; None if the request cannot be read or is not accepted any more."""

    def difference(self) -> str:
        old, new = self.script.splitlines(True), (self.rendered or "").splitlines(True)
        return "".join(difflib.unified_diff(old, new, self.file, f"{self.file} (rendered now)"))


def check_drift(path: Path) -> Drift:
    """Render the script at ``path`` again from the request in its header, and compare.

    A file that cannot be read, or is not a rendered script, counts as different.
    """
    script = ""
    try:
        script = read_script(path)
        header = read_header(script, str(path))
    except RenderError as error:
        reason = error.message.removeprefix(f"{path}: ")
        return Drift(file=str(path), reasons=(reason,), script=script, rendered=None)
    edited = origin(script) == "edited"
    reasons = ["edited by hand"] if edited else []
    try:
        cluster = load_cluster(header.cluster)
        spec = read_spec(header.request)
        rendered = render_script(spec, cluster, header.template)
    except HpcToolkitError as error:
        reasons.append(f"its request is refused now: {error.message}")
        return Drift(file=str(path), reasons=tuple(reasons), script=script, rendered=None)
    if script != rendered:
        reasons += _changes(header, read_header(rendered, str(path))) or (
            [] if reasons else ["rendered differently"]
        )
    return Drift(file=str(path), reasons=tuple(reasons), script=script, rendered=rendered)


def _changes(old: Header, new: Header) -> list[str]:
    found = []
    if old.version != new.version:
        found.append(f"rendered by hpctk {old.version}, this is {__version__}")
    if old.template_sha256 != new.template_sha256:
        found.append(f"the template {old.template} changed")
    if old.cluster_sha256 != new.cluster_sha256:
        found.append(f"the facts of the cluster {old.cluster} changed")
    return found
