"""joblib's own tests of its backends, with this one in the place of loky."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.realrun import REPOSITORY

# Each backend has a run of its own: calls that a test leaves would be made first in the next one.
REGISTERS = """
import os
import tempfile

from joblib import parallel

from hpc_toolkit.joblib import HpctkBackend as _Backend


class HpctkBackend(_Backend):
    default_n_jobs = 1  # as all of joblib's backends

    def __init__(self, **settings):
        run = os.path.join(tempfile.mkdtemp(dir=os.environ["RUNS_OF_TESTS"]), "run")
        super().__init__(**{"run": run, **settings})


parallel.BACKENDS["hpctk"] = HpctkBackend
"""
CONFTEST = """
from joblib import parallel

parallel.BACKENDS.pop("loky")
parallel.DEFAULT_BACKEND = parallel.DEFAULT_PROCESS_BACKEND = "hpctk"


def pytest_configure(config):
    config.addinivalue_line("markers", "thread_unsafe: of joblib")
"""
INTERNALS = "it looks at attributes of loky, or for its class of errors"
NOT_PASSED = {
    "test_nested_parallel_warnings": "nested calls run in threads or one by one, with no warning",
    "test_parallel_as_context_manager": INTERNALS,
    "test_error_capture": INTERNALS,
    "test_parallel_pickling": "the error is a ConfigError, not a PicklingError",
    "test_dispatch_multiprocessing": "proxies of multiprocessing need its key in the workers",
    "test_auto_memmap_on_arrays_from_generator": "arrays are copies, not maps of files",
    "test_memmapping_leaks": "arrays are copies, not maps of files",
    "test_multiple_generator_call_separated_gc": "it expects an error that only loky raises",
    "test_initializer": "workers have no initializer",
    "test_parallel_with_interactively_defined_bound_method_loky": "it looks for a log of loky",
}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_joblibs_own_tests_pass(tmp_path: Path) -> None:
    found = importlib.util.find_spec("joblib.test.test_parallel")
    if found is None or found.origin is None:
        pytest.skip("joblib is installed without its tests")
    source = Path(found.origin).read_text().replace('"loky"', '"hpctk"')
    source = source.replace("    LokyBackend,\n", "", 1)
    known = "    register_parallel_backend,\n)\n"
    assert known in source
    source = source.replace(known, f'{known}\nLokyBackend = BACKENDS["hpctk"]\n', 1)
    (tmp_path / "site").mkdir()
    (tmp_path / "runs").mkdir()
    # Also in processes that the tests start.
    (tmp_path / "site/sitecustomize.py").write_text(REGISTERS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_own.py").write_text(source)
    chosen = "(hpctk or not (threading or multiprocessing or sequential))"
    chosen += f" and not ({' or '.join(NOT_PASSED)})"

    words = ("-m", "pytest", "-q", "-k", chosen, "--tb=short", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, *words],
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path / 'site'}:{REPOSITORY}",
            "RUNS_OF_TESTS": str(tmp_path / "runs"),
        },
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 350
