"""Small GPT-NeoX models trained on real text, saved at log-spaced steps like Pythia's.

`train` is a workload: item ``{"size": "mini-s"}`` trains one model, on one core and in about a
minute, and writes ``<root>/<size>/step<n>`` for each of `STEPS`. A run again skips what is whole.
Seeds are fixed and one thread computes, so a machine gives the same bytes each time.

The texts are news stories and some tweets that Python packages carry; those that the evaluation
tasks and the prompts use are held out (see `hpc_toolkit.science.workloads.text_tasks`).
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import PermanentError, near_miss
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.science.workloads.checkpoints import quiet_transformers
from hpc_toolkit.science.workloads.text_tasks import (
    evaluation_articles,
    training_stories,
    training_tweets,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

ROOT = "demo-data/mini-pythia"
"""Where checkpoints are written unless the item names another ``root``."""

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 640)
"""Optimizer steps after which a checkpoint is written; the last is the length of the training."""

PROMPTS = 64
"""Prompts of the metrics stage."""

VOCABULARY = 3072
"""Tokens that the tokenizer knows, at most."""

_BATCH, _WINDOW = 8, 128  # sequences a step, tokens a sequence
_TWEETS = 10  # every tenth tweet is used; stories teach topics
_WARMUP, _DECAY = 20, 0.25  # steps, share of the training
_MATRIX_RATE, _MOMENTUM = 0.02, 0.95
_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Size:
    """The architecture of one model."""

    hidden: int
    """Width of the hidden states."""

    blocks: int
    """Transformer blocks; there is one hidden state more, the embeddings."""

    heads: int
    """Attention heads."""

    learning_rate: float
    """Of AdamW, which trains the embeddings, at the end of the warm-up."""


SIZES = {
    "mini-s": Size(hidden=64, blocks=4, heads=4, learning_rate=7e-3),
    "mini-m": Size(hidden=96, blocks=4, heads=4, learning_rate=6e-3),
}
"""The models, smallest first."""

LAYERS = {name: size.blocks + 1 for name, size in SIZES.items()}
"""Hidden states of each model: layers 0 to ``LAYERS[size] - 1``."""


def train_items(root: str = ROOT) -> list[dict[str, Any]]:
    """One item per model, the longest training first."""
    return [{"size": name, "root": root} for name in reversed(SIZES)]


def metric_items(
    sizes: Sequence[str] = tuple(SIZES), steps: Sequence[int] = STEPS
) -> list[dict[str, Any]]:
    """One item per (checkpoint, layer), grouped by checkpoint."""
    return [
        {"checkpoint": f"{name}/step{step}", "layer": layer}
        for name in sizes
        for step in steps
        for layer in range(LAYERS[name])
    ]


def write_prompts(path: str | Path, count: int = PROMPTS) -> list[str]:
    """Write ``count`` sentences of held-out BBC stories, one a line, and return them."""
    articles = evaluation_articles()
    first = [
        _sentences(article.body)[:1] for article in articles[:: max(1, len(articles) // count)]
    ]
    prompts = [sentence for found in first for sentence in found][:count]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(path), [("\n".join(prompts) + "\n").encode()])
    return prompts


def prepare(item: dict[str, Any]) -> dict[str, Any]:
    """Write the prompts where an item names them, else train the model that it names."""
    if "prompts" in item:
        return {"prompts": len(write_prompts(item["prompts"]))}
    return train(item)


def train(item: dict[str, Any]) -> dict[str, Any]:
    """Train the model ``item["size"]`` and write its checkpoints.

    Optional keys: ``root``; ``steps``, the steps to save, the last of which ends the training;
    ``texts``, how many training texts are used. Returns the settings, the loss in nats per token
    at the beginning and the end, and the seconds of this call.

    Raises:
        PermanentError: unknown size, or steps that are not increasing numbers from 0 up.
    """
    started = time.perf_counter()
    settings = _settings(item)
    directory = Path(item.get("root", ROOT)) / settings["size"]
    directory.mkdir(parents=True, exist_ok=True)
    missing = [n for n in settings["steps"] if _saved(directory, n, settings) is None]
    if missing:
        _train(directory, settings)
    first, last = (_saved(directory, n, settings) or {} for n in (0, settings["steps"][-1]))
    return {
        **settings,
        "first_loss": first.get("loss"),
        "loss": last.get("loss"),
        "trained": bool(missing),
        "seconds": round(time.perf_counter() - started, 3),
    }


def _settings(item: dict[str, Any]) -> dict[str, Any]:
    name, steps = item.get("size"), list(item.get("steps", STEPS))
    if name not in SIZES:
        msg = f"no size {name!r}"
        raise PermanentError(msg, hint=near_miss(str(name), list(SIZES)))
    if not steps or steps[0] != 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        msg = f"steps must increase from 0, got {steps}"
        raise PermanentError(msg)
    return {"size": name, "steps": steps, "texts": item.get("texts")}


def _train(directory: Path, settings: dict[str, Any]) -> None:
    import torch
    from transformers import GPTNeoXForCausalLM

    # Sums depend on how they are split between threads.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size, steps = SIZES[settings["size"]], settings["steps"]
    texts = training_texts()[: settings["texts"]]
    tokenizer = train_tokenizer(texts)
    model = GPTNeoXForCausalLM(model_config(size, len(tokenizer)))
    optimizer = _Optimizer(model, size.learning_rate)
    for step, batch in enumerate(_batches(tokenizer, texts, steps[-1] + 1)):
        loss = model(input_ids=batch, labels=batch).loss
        if step in steps:
            state = {"step": step, "loss": float(loss.detach()), **settings}
            _save(directory / f"step{step}", model, tokenizer, state)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(_schedule(step, steps[-1]))


class _Optimizer:
    """Muon for the matrices of the blocks, AdamW for everything else.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of
    a matrix by the nearest orthogonal matrix. With AdamW alone such a short training ends before
    the upper layers have learned what the evaluation tasks need.
    """

    def __init__(self, model: Any, learning_rate: float) -> None:
        import torch

        named = list(model.named_parameters())
        self._matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
        self._momenta = [torch.zeros_like(p) for p in self._matrices]
        others = [p for name, p in named if p.ndim != 2 or ".layers." not in name]
        self._adam = torch.optim.AdamW(
            others, lr=learning_rate, betas=(0.9, 0.995), weight_decay=0.01
        )
        self._rate = learning_rate

    def step(self, share: float) -> None:
        """One update with ``share`` of the learning rates."""
        import torch

        self._adam.param_groups[0]["lr"] = self._rate * share
        self._adam.step()
        with torch.no_grad():
            for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
                momentum.mul_(_MOMENTUM).add_(matrix.grad)
                update = _orthogonal(matrix.grad + _MOMENTUM * momentum)
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.sub_(update, alpha=_MATRIX_RATE * share * scale)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly the orthogonal factor of a matrix, by five Newton-Schulz iterations."""
    if matrix.shape[0] > matrix.shape[1]:
        return _orthogonal(matrix.T).T
    x: torch.Tensor = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram).matmul(x)
    return x


def training_texts() -> list[str]:
    """All texts to train on, in an order that is always the same."""
    import numpy as np

    texts = training_stories() + training_tweets()[::_TWEETS]
    return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]


def model_config(size: Size, vocabulary: int) -> Any:
    """The GPT-NeoX configuration of a size."""
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.blocks,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def _schedule(step: int, last: int) -> float:
    """Share of the learning rate: a short rise, a long plateau, a fall to zero."""
    return min(1.0, (step + 1) / _WARMUP, (last - step) / max(1.0, _DECAY * last))


def train_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE tokenizer for these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END_OF_TEXT)


def token_windows(tokenizer: Any, texts: list[str]) -> Any:
    """The texts' token ids, one after the other, cut into rows ``(windows, 128)`` of int64."""
    import numpy as np

    stream = [token for ids in tokenizer(texts)["input_ids"] for token in (*ids, 0)]
    return np.array(stream[: len(stream) // _WINDOW * _WINDOW]).reshape(-1, _WINDOW)


def _batches(tokenizer: Any, texts: list[str], count: int) -> Iterator[torch.Tensor]:
    """``count`` tensors of token ids ``(batch, window)``: all windows of the texts, reshuffled."""
    import numpy as np
    import torch

    windows = token_windows(tokenizer, texts)
    rng = np.random.default_rng(1)
    epochs = -(-count * _BATCH // len(windows))
    order = np.concatenate([rng.permutation(len(windows)) for _ in range(epochs)])
    for step in range(count):
        yield torch.from_numpy(windows[order[step * _BATCH : (step + 1) * _BATCH]])


def _saved(directory: Path, step: int, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What a whole checkpoint of these settings recorded; None if there is none."""
    path = directory / f"step{step}" / "training.json"
    if not path.is_file():
        return None
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state if settings.items() <= state.items() else None


def _save(target: Path, model: Any, tokenizer: Any, state: dict[str, Any]) -> None:
    """Write a checkpoint aside and give it its name when it is whole; keep one that is the same."""
    if _saved(target.parent, state["step"], {k: state[k] for k in state if k != "loss"}):
        return
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with quiet_transformers():
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    (aside / "training.json").write_text(json.dumps(state), encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)


def _sentences(text: str) -> list[str]:
    sentences = re.split(r"(?<=[.!?])\s+", text.replace("\n", " "))
    return [s for s in sentences if 10 <= len(s.split()) <= 40]
