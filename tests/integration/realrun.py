"""The command line as a user calls it, and what its runs leave on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_toolkit.run import Run

T = TypeVar("T")

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
_MARK = "TEST_PROCESSES_OF"
HANG_S = 400.0
"""After this time a wait is taken for hung; a busy machine is far slower than an idle one."""


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], str],
    *,
    limit_s: float = HANG_S,
    every_s: float = 0.02,
    of: Started | None = None,
) -> T:
    """Wait until a condition is true and give what it gave; the limit guards against hanging.

    Fails at once, with what it printed, if the command that is to bring it about has ended. A
    function ``what`` is called only at the end, whose log says more than that of the beginning.
    """
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert of is None or of.process.poll() is None, f"no {what}: {of.ended()}"
        over = time.monotonic() > end
        assert not over, f"waited {limit_s:g} s for {what if isinstance(what, str) else what()}"
        time.sleep(every_s)
    return found


def lives(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@dataclass(frozen=True)
class Ended:
    """A command that came to its end."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Started:
    """A command that runs."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.process = process
        self._out = out
        self._err = err

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, sig: int) -> None:
        self.process.send_signal(sig)

    def printed(self) -> str:
        """What it wrote to stdout so far."""
        return self._out.read_text()

    def kill(self) -> None:
        """Kill the command and the processes of its group."""
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self, *, limit_s: float = HANG_S) -> Ended:
        """Wait for the end."""
        code = self.process.wait(timeout=limit_s)
        return Ended(code, self._out.read_text(), self._err.read_text())


class Hpctk:
    """Calls the command line below one directory."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.trace = cwd / "trace"
        self.python_path = f"{REPOSITORY}:{HERE}"
        self._mark = uuid.uuid4().hex
        self._started: list[Started] = []

    def environment(self, changes: dict[str, str] | None = None) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": self.python_path,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
            _MARK: self._mark,
            **(changes or {}),
        }

    def start(
        self,
        *words: object,
        env: dict[str, str] | None = None,
        stdin: str = "",
        first: str = "",
        umask: int = 0o022,
    ) -> Started:
        """Start a command; ``first`` is Python code that its process runs before."""
        call = f"{first}\nfrom hpc_toolkit.cli import main\nmain()"
        number = len(self._started)
        out, err = self.cwd / f".out-{number}", self.cwd / f".err-{number}"
        source = self.cwd / f".in-{number}"
        source.write_text(stdin)
        with out.open("wb") as out_file, err.open("wb") as err_file, source.open("rb") as in_file:
            process = subprocess.Popen(
                [
                    sys.executable,
                    *(["-c", call] if first else ["-m", "hpc_toolkit"]),
                    *map(str, words),
                ],
                cwd=self.cwd,
                env=self.environment(env),
                stdin=in_file,
                stdout=out_file,
                stderr=err_file,
                # A group of its own, so that a test can signal it as a terminal or Slurm does.
                start_new_session=True,
                umask=umask,
            )
        started = Started(process, out, err)
        self._started.append(started)
        return started

    def __call__(self, *words: object, limit_s: float = HANG_S, **how: Any) -> Ended:
        """Run a command to its end; ``how`` as for :meth:`start`."""
        return self.start(*words, **how).ended(limit_s=limit_s)

    def python(self, *words: object, cwd: Path | None = None) -> Ended:
        """Run a Python program to its end, as a user's script is run."""
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=cwd or self.cwd,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def make(
        self,
        items: list[dict[str, Any]],
        workload: str | None = "sample_workloads:crash",
        **settings: Any,
    ) -> Run:
        """A run named ``run`` of items that get an ``id`` and the ``trace``."""
        named = [
            {"id": number, "trace": str(self.trace), **item} for number, item in enumerate(items)
        ]
        name = settings.pop("name", "run")
        return Run.create(name, named, workload=workload, **settings)

    def worked(self, *given: Any, workers: int | None = None, **settings: Any) -> Run:
        """A run as :meth:`make` has it, after 'hpctk work' ended with 0 on it."""
        run = self.make(*given, **settings)
        ended = self("work", run.root, *(["--workers", workers] if workers else []))
        assert ended.code == 0, ended.err
        return run

    def make_sleeping(self, count: int, seconds: float = 0.05, **settings: Any) -> Run:
        """A run of items that sleep and note when they start and end."""
        items: list[dict[str, Any]] = [{"seconds": seconds} for _ in range(count)]
        return self.make(items, "hpc_toolkit.science.workloads.synthetic:Sleep", **settings)

    def noted(self, *beginning: str) -> list[list[str]]:
        """The lines of the trace, as words, that begin with these words."""
        with suppress(FileNotFoundError):
            lines = [line.split() for line in self.trace.read_text().splitlines()]
            return [words for words in lines if words[: len(beginning)] == list(beginning)]
        return []

    def leftovers(self) -> list[str]:
        """Commands that still run, or whose children do, after a moment; they are killed."""
        for started in self._started:
            if started.process.poll() is None:
                started.process.kill()
                started.process.wait()
                return [f"{started.process.args!r}", *self._kill_marked()]
        end = time.monotonic() + HANG_S
        while self.marked() and time.monotonic() < end:
            time.sleep(0.01)
        return self._kill_marked()

    def kill_all(self) -> None:
        """Kill everything that was started here, and all that it started meanwhile."""
        while self._kill_marked():
            pass

    def marked(self) -> dict[int, str]:
        """The processes that were started here, or by those, and their command lines."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{_MARK}={self._mark}".encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes().decode()
        return found

    def _kill_marked(self) -> list[str]:
        marked = self.marked()
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"{pid}: {command!r}" for pid, command in marked.items()][:5]


def write_items(items: Sequence[object]) -> None:
    """Write the file of items ``items.jsonl``."""
    Path("items.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items))


def journal_lines(run: Run, kind: str | None = None) -> list[dict[str, Any]]:
    """All whole journal lines of a run, those of one kind or all; the file's worker is ``by``."""
    found = []
    for path in sorted(run.paths.journals.iterdir()):
        for line in path.read_bytes().split(b"\n")[:-1]:
            with suppress(ValueError):
                record = json.loads(line)
                if kind is None or record["type"] == kind:
                    found.append({**record, "by": path.stem})
    return found


def workers_of(run: Run) -> list[dict[str, Any]]:
    """What every worker says of itself; one that starts may have said nothing yet."""
    said = [path.read_bytes() for path in sorted(run.paths.workers.glob("*.json"))]
    return [json.loads(text) for text in said if text]


def rows_by_id(run: Run, *, partial: bool = False) -> dict[int, dict[str, Any]]:
    """Gathered rows, by the items' ids."""
    fresh = Run.open(run.root)
    return {row["item"]["id"]: row for row in fresh.results(partial=partial)}
