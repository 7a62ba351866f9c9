"""The example of a notebook on this machine."""

from __future__ import annotations

import json

from tests.documents import REPOSITORY
from tests.notebooks import EXAMPLE


def test_the_example_is_kept_with_outputs_of_no_real_machine() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")

    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["execution_count"] for cell in code)
    assert "48 of 48" in text
    assert not any(word in text for word in ("/root", "/tmp", str(REPOSITORY)))
