"""An sbatch that accepts every job and keeps its script and environment, for tests of submitit."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

_SBATCH = """\
#!/bin/sh
number=$(cat "$0.number" 2>/dev/null || echo 100)
echo $((number + 1)) > "$0.number"
for script do :; done
cp "$script" "$0.script-$number"
env > "$0.env-$number"
[ "$number" -lt "${FAILS_FROM:-1000}" ] || { echo "sbatch: error: too many jobs" >&2; exit 1; }
echo "$number $*" >> "$0.queue"
[ -z "$LOSES" ] || { echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1; }
echo "$number"
"""


class KeptJobs:
    """The submitted jobs, numbered from 100; also provides an srun, which submitit requires."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root / "programs"
        self._root.mkdir()
        listing = '#!/bin/sh\ncat "${0%squeue}sbatch.queue"\n'
        programs = {"sbatch": _SBATCH, "srun": "#!/bin/sh\nexit 1\n", "squeue": listing}
        for name, text in programs.items():
            (self._root / name).write_text(text)
            (self._root / name).chmod(0o755)
        for name in list(os.environ):
            if name.startswith(("SLURM", "SBATCH", "HPCTK")):
                monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", f"{self._root}:{os.environ['PATH']}")
        # The checkout may be in a directory from which hpctk refuses to submit.
        monkeypatch.chdir(root)

    def script(self, number: int = 100) -> str:
        """Return the script of one job."""
        return (self._root / f"sbatch.script-{number}").read_text()

    def environ(self, number: int = 100) -> dict[str, str]:
        """Return the environment in which one job was submitted."""
        lines = (self._root / f"sbatch.env-{number}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def options(self) -> list[dict[str, str]]:
        """Return the directives of every job."""
        found = sorted(self._root.glob("sbatch.script-*"))
        return [options(path.read_text()) for path in found]


def options(text: str) -> dict[str, str]:
    """Return the directives of a script, by name; assert that each occurs once."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE)
    assert len(found) == len(re.findall("^#SBATCH", text, re.MULTILINE))
    assert len(dict(found)) == len(found)
    return {name: shlex.split(value)[0] if value else "" for name, value in found}
