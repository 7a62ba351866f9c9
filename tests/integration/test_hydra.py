"""Sweeps of Hydra with the launcher of this package: its published tests, and scripts."""

from __future__ import annotations

import pytest

pytest.importorskip("hydra", reason="needs hydra-core")

from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)


@pytest.mark.parametrize(("launcher_name", "overrides"), [("hpctk", [])])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(
    ("launcher_name", "overrides"), [("hpctk", ["hydra.sweeper.max_batch_size=2"])]
)
class TestBatches(BatchedSweeperTestSuite):
    pass


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=hpctk"])]
)
class TestIntegration(IntegrationTestSuite):
    pass
