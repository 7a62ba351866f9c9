"""The campaigns in examples/ that need no models: their files are valid and their code scores."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn", reason="the extra demo is not installed")

from hpc_toolkit.campaign.coordinator import dry_run
from hpc_toolkit.campaign.settings import read_campaign
from hpc_toolkit.worker.loading import load_object
from tests.documents import REPOSITORY


@pytest.mark.parametrize(
    ("name", "arms", "tasks"), [("boosting", 720, 5), ("text-pipelines", 420, 3)]
)
def test_an_example_is_a_valid_campaign_whose_code_scores_arms(
    name: str, arms: int, tasks: int
) -> None:
    file = REPOSITORY / f"examples/{name}.toml"
    campaign = read_campaign(file)
    found = dry_run(campaign, str(file))
    assert (found["arms"], len(found["tasks"]), found["baseline"]) == (arms, tasks, 1)

    score = load_object(campaign.tasks.workload, campaign.path)
    for arm in list(campaign.arms())[:: arms // 3]:
        assert -1 < score({**arm.keys, "task": campaign.tasks.names[0]})["score"] < 1


def test_the_example_for_pythia_is_5184_arms_in_a_few_lines() -> None:
    file = REPOSITORY / "examples/pythia-l40s.toml"
    lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
    found = list(read_campaign(file).arms())

    assert len(found) == 5184
    assert len(lines) <= 25
