"""The mutants that prove the tests of the invariants; 'make soak' makes them."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_mutant_can_be_made_in_one_place(mutant: Mutant) -> None:
    code = (ROOT / "hpc_toolkit" / mutant.file).read_text(encoding="utf-8")

    assert code.count(mutant.old) == 1
    assert mutant.tests
    assert all((ROOT / "tests/unit" / name.partition("::")[0]).is_file() for name in mutant.tests)
