"""What a study keeps on NFS when processes are killed, beside Optuna's own storages.

    python benchmarks/study_nfs.py [--trials 200] [--kills 6] [--write]

Two hosts mount an NFSv4.2 export; the server and the hosts are kernels of their own (user-mode
Linux). Each host has 4 processes that share a study of 200 trials: workers of ``hpctk study``, or
processes with Optuna's JournalStorage or SQLite, which stop by ``MaxTrialsCallback``. A trial takes
0.2 s. All processes of one host are killed by SIGKILL a number of times, and started again.

Counted are trials by state at the end, numbers that are there twice, and processes that ended with
an error. Exit code 0 if ours has each trial once. Takes half an hour; needs root, the extra
``optuna`` and what ``.ci/system`` installs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import number, parser
from resultsfile import facts, table, write_section

from tests.sharedfs.filesystems import mounted
from tests.sharedfs.nfs import NFS42
from tests.sharedfs.rehearsal import HIT, SMALL, SPARED, Rehearsal

if TYPE_CHECKING:
    from tests.sharedfs.ranks import Ranks

KINDS = {"hpctk": "hpctk study", "journal": "JournalStorage", "sqlite": "SQLite"}
EACH, LIMIT_S = 4, 900.0
TUNE = """
import os, sys, time
import optuna
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState

def objective(trial):
    time.sleep(0.2)
    return sum((trial.suggest_float(f"x{at}", -5, 5) - 1) ** 2 for at in range(4))

def load(kind, base):
    if kind == "hpctk":
        from hpc_toolkit import study
        return study.load(base + "/run")
    if kind == "journal":
        storage = JournalStorage(JournalFileBackend(base + "/study.log"))
    else:
        wait = {"connect_args": {"timeout": 100}}
        storage = RDBStorage(f"sqlite:///{base}/study.db", engine_kwargs=wait)
    made = {"sampler": optuna.samplers.TPESampler(constant_liar=True), "load_if_exists": True}
    return optuna.create_study(study_name="s", storage=storage, **made)

if __name__ == "__main__":
    what, kind, base, trials = sys.argv[1:]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = load(kind, base)
    if what == "share":
        stop = MaxTrialsCallback(int(trials), states=(TrialState.COMPLETE,))
        study.optimize(objective, callbacks=[stop])
    elif what == "count":
        import json
        print(json.dumps([(one.number, one.state.name) for one in study.trials]))
"""


class Shared:
    """One study on two hosts."""

    def __init__(self, kind: str, rehearsal: Rehearsal, trials: int) -> None:
        self._kind, self._rehearsal, self._trials = kind, rehearsal, trials
        self._base = rehearsal.run.parent
        self._tune = rehearsal.cwd / "tune.py"
        self._tune.write_text(TUNE)

    def python(self, what: str) -> list[str]:
        words = (self._tune, what, self._kind, self._base, self._trials)
        return [sys.executable, *map(str, words)]

    def create(self) -> None:
        if self._kind == "hpctk":
            words = ("study", f"{self._tune}:objective", "--trials", self._trials)
            self._rehearsal.hpctk(HIT, *words, "--run", self._rehearsal.run, "--workers", 0)
        else:
            made = self._rehearsal.start_program(HIT, self.python("create"))
            assert made.ended(limit_s=LIMIT_S).code == 0

    def start(self, host: str) -> list[Ranks]:
        """All processes of a host."""
        if self._kind == "hpctk":
            return [self._rehearsal.work(host, EACH)]
        return [self._rehearsal.start_program(host, self.python("share")) for _ in range(EACH)]

    def has(self, trials: int) -> bool:
        return len(self.trials()) >= trials

    def trials(self) -> list[tuple[int, str]]:
        counted = self._rehearsal.start_program(SPARED, self.python("count"))
        ended = counted.ended(limit_s=LIMIT_S)
        assert ended.code == 0, ended.err
        return [(one, state) for one, state in json.loads(ended.out)]


def measured(kind: str, rehearsal: Rehearsal, trials: int, kills: int) -> list[str]:
    shared = Shared(kind, rehearsal, trials)
    shared.create()
    began = time.monotonic()
    spared, hit = shared.start(SPARED), shared.start(HIT)
    for at in range(kills):
        goal = (at + 1) * trials // (kills + 2)
        rehearsal.until(partial(shared.has, goal), f"{goal} trials")
        for ranks in hit:
            ranks.kill()
        hit = shared.start(HIT)
    codes: Counter[int | str] = Counter()
    for ranks in spared + hit:
        try:
            codes[ranks.ended(limit_s=LIMIT_S).code] += 1
        except AssertionError:
            codes["hung"] += 1
    seconds = time.monotonic() - began
    found = shared.trials()
    states = Counter(state for _, state in found)
    twice = len(found) - len({one for one, _ in found})
    bad = sum(codes.values()) - codes[0]
    print(kind, dict(states), twice, dict(codes), round(seconds, 1), file=sys.stderr, flush=True)
    more = states.total() - states["COMPLETE"]
    return [
        KINDS[kind],
        str(states["COMPLETE"]),
        str(more),
        str(twice),
        str(bad),
        f"{seconds:.0f} s",
    ]


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--trials", type=number, default=200, help="of each study")
    given.add_argument("--kills", type=number, default=6, help="of all processes of one host")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="study-", ignore_cleanup_errors=True) as name:
            base = Path(name)
            (base / "hosts").mkdir()
            with mounted(base / "hosts", (NFS42,)) as filesystems:
                filesystem = filesystems[NFS42.name]
                size = replace(SMALL, workers=EACH, limit_s=LIMIT_S)
                rehearsal = Rehearsal(filesystem, base, size, "run")
                try:
                    rows.append(measured(kind, rehearsal, options.trials, options.kills))
                finally:
                    rehearsal.close()
    head = ["", "complete", "others", "twice", "processes with an error", "time"]
    words = (
        f"{options.trials} trials, {options.kills} kills of the 4 processes of one of two hosts."
    )
    lines = [words, "", *table(head, rows)]
    print("\n".join(lines))
    if options.write:
        write_section("Studies on NFS, killed", ["", facts(), "", *lines])
    if rows[0][1:5] != [str(options.trials), "0", "0", "0"]:
        sys.exit("a trial of ours is missing or there twice")


if __name__ == "__main__":
    main()
