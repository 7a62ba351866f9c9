"""Train gradient-boosted trees with all cores that this process was granted: XGBoost or LightGBM.

    python examples/train_trees.py --library xgboost --output runs/trees
    hpctk render train-cpu -- examples/train_trees.py --library lightgbm

The data is made by scikit-learn, so nothing is downloaded. Every few rounds, and at SIGUSR1,
SIGTERM or the end of the job's time, the model is saved; with rounds left it exits with 75 then,
and run again goes on with the trees that it has. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpc_toolkit.rundir.files import read_fresh, replace_file
from hpc_toolkit.training.distributed import TRY_AGAIN, StopSignal

if TYPE_CHECKING:
    import numpy as np


def main(argv: list[str] | None = None) -> int:
    """Train as the arguments say; 0 after the last round, 75 if there are rounds left."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    default = Path(os.environ.get("HPCTK_RUN_DIR") or "runs/train-trees")
    add("--output", "--run-dir", type=Path, default=default)
    add("--library", dest="grower", choices=tuple(LIBRARIES), default="xgboost")
    add("--rows", type=int, default=20_000)
    add("--features", type=int, default=40)
    add("--rounds", type=int, default=100, help="trees of the whole training")
    add("--checkpoint-every", type=int, default=10, help="rounds between two saved models")
    add("--threads", type=int, default=granted_cores(), help="default: all cores granted")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.checkpoint_every < 1:
        parser.error("--rounds and --checkpoint-every are at least 1")

    began = time.perf_counter()
    args.output.mkdir(parents=True, exist_ok=True)
    train, test = made_data(args.rows, args.features)
    trees = LIBRARIES[args.grower](args.threads, train, read_fresh(model_path(args)))
    first, growing, busy = trees.rounds(), time.perf_counter(), time.process_time()
    with StopSignal() as stop:
        while trees.rounds() < args.rounds:
            trees.grow(min(args.checkpoint_every, args.rounds - trees.rounds()))
            replace_file(model_path(args), [trees.saved()])
            if trees.rounds() < args.rounds and stop.agreed():
                return TRY_AGAIN
    growing, busy = time.perf_counter() - growing, time.process_time() - busy
    wrong = float(((trees.predict(test[0]) > 0.5) != test[1]).mean())
    summary = {
        "library": args.grower,
        "threads": args.threads,
        "rounds": trees.rounds(),
        "resumed_from": first,
        "rows": len(train[1]),
        "test_error": round(wrong, 4),
        "seconds": round(time.perf_counter() - began, 3),
        "busy_cores": round(busy / growing, 2),
        "model": str(model_path(args)),
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


def granted_cores() -> int:
    """Cores that this process may use: those of its affinity, and no more than Slurm gave it."""
    affinity = len(os.sched_getaffinity(0))
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(affinity, int(given)) if given.isdigit() else affinity


def model_path(args: argparse.Namespace) -> Path:
    """Where the model is saved: JSON of XGBoost, text of LightGBM."""
    directory: Path = args.output
    return directory / {"xgboost": "xgboost.json", "lightgbm": "lightgbm.txt"}[args.grower]


Table = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]
"""Features ``(rows, features)`` and labels 0 or 1."""


def made_data(rows: int, features: int) -> tuple[Table, Table]:
    """Rows to train on and a fifth to test on, the same each time."""
    from sklearn.datasets import make_classification
    from sklearn.model_selection import train_test_split

    table, labels = make_classification(
        rows, features, n_informative=features // 2, flip_y=0.02, random_state=0
    )
    parts = train_test_split(table, labels, test_size=0.2, random_state=0)
    return (parts[0], parts[2]), (parts[1], parts[3])


class Trees(Protocol):
    """One library's trees, which grow on."""

    def __init__(self, threads: int, train: Table, saved: bytes) -> None:
        """Take up what was saved; b"" is nothing."""
        ...

    def rounds(self) -> int:
        """Trees so far."""
        ...

    def grow(self, rounds: int) -> None:
        """Train this many more trees."""
        ...

    def saved(self) -> bytes:
        """The model as its library writes it."""
        ...

    def predict(self, table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Probabilities of label 1."""
        ...


class XGBoostTrees:
    """``xgboost.train`` with ``xgb_model``, by histograms."""

    def __init__(self, threads: int, train: Table, saved: bytes) -> None:
        import xgboost

        self._settings = {
            "objective": "binary:logistic",
            "tree_method": "hist",
            "nthread": threads,
            "verbosity": 0,
        }
        self._data = xgboost.DMatrix(*train, nthread=threads)
        self._booster = None
        if saved:
            self._booster = xgboost.Booster(self._settings)
            self._booster.load_model(bytearray(saved))

    def rounds(self) -> int:
        return self._booster.num_boosted_rounds() if self._booster else 0

    def grow(self, rounds: int) -> None:
        import xgboost

        self._booster = xgboost.train(
            self._settings, self._data, num_boost_round=rounds, xgb_model=self._booster
        )

    def saved(self) -> bytes:
        assert self._booster is not None
        return bytes(self._booster.save_raw("json"))

    def predict(self, table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        import xgboost

        assert self._booster is not None
        found: np.ndarray[Any, Any] = self._booster.predict(xgboost.DMatrix(table))
        return found


class LightGBMTrees:
    """``lightgbm.train`` with ``init_model``."""

    def __init__(self, threads: int, train: Table, saved: bytes) -> None:
        import lightgbm

        self._settings = {"objective": "binary", "num_threads": threads, "verbosity": -1}
        self._data = lightgbm.Dataset(*train, free_raw_data=False)
        self._booster = lightgbm.Booster(model_str=saved.decode()) if saved else None

    def rounds(self) -> int:
        return int(self._booster.current_iteration()) if self._booster else 0

    def grow(self, rounds: int) -> None:
        import lightgbm

        self._booster = lightgbm.train(
            self._settings, self._data, num_boost_round=rounds, init_model=self._booster
        )

    def saved(self) -> bytes:
        assert self._booster is not None
        return str(self._booster.model_to_string()).encode()

    def predict(self, table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        assert self._booster is not None
        found: np.ndarray[Any, Any] = self._booster.predict(table)
        return found


LIBRARIES: dict[str, type[Trees]] = {"xgboost": XGBoostTrees, "lightgbm": LightGBMTrees}
"""What can grow trees."""


if __name__ == "__main__":
    sys.exit(main())
