"""The example of a notebook on this machine."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.documents import REPOSITORY
from tests.notebooks import EXAMPLE, execute

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.realrun import Hpctk


@pytest.mark.soak  # tests/slurm/test_notebook.py runs it
@pytest.mark.slow
def test_the_example_works_on_this_machine(hpctk: Hpctk, tmp_path: Path) -> None:
    environ = hpctk.environment({"CUDA_VISIBLE_DEVICES": "5,7"})

    done = execute(EXAMPLE, tmp_path, environ)

    assert "48 of 48" in done.html("status")
    assert "complete" in done.html("status")
    host = os.uname().nodename
    assert repr([(host, "5"), (host, "7")]) in done.text("rows")

    again = execute(EXAMPLE, tmp_path, environ)

    assert repr([(host, "5"), (host, "7")]) in again.text("rows")


def test_the_example_is_kept_with_outputs_of_no_real_machine() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")

    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["execution_count"] for cell in code)
    assert "48 of 48" in text
    assert not any(word in text for word in ("/root", "/tmp", str(REPOSITORY)))
