"""What waiting for a scenario says when it was in vain."""

from __future__ import annotations

import pytest

from tests.slurm.rehearsal import wait_until


def test_waiting_in_vain_tells_what_is_known_at_its_end() -> None:
    log = ["began"]

    def never() -> bool:
        log.append("went on")
        return False

    with pytest.raises(AssertionError, match="waited 0 s for the end of began, went on"):
        wait_until(never, lambda: f"the end of {', '.join(log)}", limit_s=0)
