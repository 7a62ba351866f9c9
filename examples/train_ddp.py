"""Train the demo's small language model on any number of ranks.

    python examples/train_ddp.py --output runs/ddp                              one process
    hpctk launch --nproc-per-node 2 --run-dir runs/ddp examples/train_ddp.py    two ranks

The ranks share every global batch, so the losses do not depend on their number but for rounding.
SIGUSR1, SIGTERM and the end of the job's time make all ranks save after the same step and exit with
75; run again, the training goes on behind the last step that is saved.

Below the output directory: ``loss.jsonl``, a line per step, in which steps that were lost and made
again appear again; ``checkpoints/``; ``data/``, the texts as tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.training.distributed import (
    TRY_AGAIN,
    Checkpoints,
    ResumableSampler,
    StopSignal,
    accumulating,
    all_reduce,
    leave,
    process_group,
    wrap_model,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from hpc_toolkit.training.distributed import DistributedInfo

# A script's own directory is on the path, the repository that holds it is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_log = logging.getLogger("train_ddp")


def main(argv: list[str] | None = None) -> int:
    """Train as the arguments say; 0 after the last step, 75 if there are steps left."""
    args = arguments().parse_args(argv)
    with process_group(args.backend) as info, StopSignal() as stop:
        logging.basicConfig(format=f"%(asctime)s rank {info.rank} %(message)s", level="INFO")
        _log.info("process %d", os.getpid())
        try:
            return Training(args, info).run(stop)
        except HpcToolkitError as error:
            _log.error("%s (%s)", error, error.hint)
            raise


def arguments() -> argparse.ArgumentParser:
    """The options; every one is the same on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    default = Path(os.environ.get("HPCTK_RUN_DIR") or "runs/train-ddp")
    add("--output", "--run-dir", type=Path, default=default, help="default: that of hpctk launch")
    add("--model", choices=("mini-s", "mini-m", "plain"), default="mini-s")
    add("--texts", type=int, help="number of texts to use [default: all]")
    add("--steps", type=int, default=100, help="optimizer steps of the whole training")
    add("--batch-size", type=int, default=16, help="sequences a step, over all ranks")
    add("--accumulate", type=int, default=1, help="passes a step")
    add("--optimizer", choices=("sgd", "adamw"), default="adamw")
    add("--lr", type=float, default=3e-3)
    add("--precision", choices=("auto", "float32", "bf16", "fp16"), default="auto")
    add("--bucket-cap-mb", type=float, default=25)
    add("--checkpoint-every", type=int, default=50, help="steps; 0: only at the end or a signal")
    add("--keep", type=int, default=2, help="checkpoints that are kept")
    add("--resume", choices=("auto", "never"), default="auto")
    add("--backend", choices=("gloo", "nccl"), help="default: HPCTK_BACKEND, else by the device")
    add("--seed", type=int, default=0)
    return parser


class Training:
    """One rank's part of the training."""

    def __init__(self, args: argparse.Namespace, info: DistributedInfo) -> None:
        import torch

        self.args, self.info = args, info
        self.micro_batch = batch_per_pass(args, info)
        torch.manual_seed(args.seed)
        self.windows = token_windows(args, info)
        check_texts(args.batch_size, len(self.windows))
        self.model = wrap_model(make_model(args.model), bucket_cap_mb=args.bucket_cap_mb)
        self.dtype = autocast_dtype(args.precision, info.device)
        kind = torch.optim.SGD if args.optimizer == "sgd" else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=args.lr)
        # float16 alone has gradients that vanish without scaling.
        self.scaler = torch.amp.GradScaler(
            info.device.partition(":")[0], enabled=self.dtype == torch.float16
        )
        self.sampler = ResumableSampler(self.windows, seed=args.seed, remainder="drop")
        self.checkpoints = Checkpoints(
            args.output / "checkpoints",
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "scaler": self.scaler,
                "sampler": self.sampler,
            },
            keep=args.keep,
            every=args.checkpoint_every,
        )

    def run(self, stop: StopSignal) -> int:
        """Train up to the last step; the exit code."""
        restored = self.checkpoints.restore() if self.args.resume == "auto" else None
        first = restored.step if restored else 0
        source = restored.path if restored else "nothing"
        _log.info("%s on %s from %s", self.info.backend or "alone", self.info.device, source)
        began = time.perf_counter()
        step, saved, loss = first, first, None
        with self._losses() as losses:
            for batches in itertools.islice(
                self._global_batches(), max(0, self.args.steps - first)
            ):
                loss = self._step(batches)
                step += 1
                self.sampler.took(self.args.batch_size)
                line = {"step": step, "loss": loss, **self._which()}
                losses.write(json.dumps(line) + "\n")
                losses.flush()
                if self.checkpoints.due(step):
                    saved = self._save(step)
                if stop.agreed(saving_s=self.checkpoints.saving_s):
                    break
            if saved < step:
                self._save(step)
            if step < self.args.steps:
                _log.info("stopped after step %d", step)
                return TRY_AGAIN
        if self.info.is_main:
            sys.stdout.write(json.dumps(self._summary(first, loss, time.perf_counter() - began)))
            sys.stdout.write("\n")
            sys.stdout.flush()
        return 0

    def _save(self, step: int) -> int:
        path = self.checkpoints.save(step)
        _log.info("saved %s in %.3f s", path, self.checkpoints.saving_s)
        return step

    def _step(self, batches: tuple[torch.Tensor, ...]) -> float:
        """One optimizer step; the loss averaged over all samples of the global batch."""
        import torch

        total = torch.zeros((), dtype=torch.float64, device=self.info.device)
        for passed, batch in enumerate(batches):
            with accumulating(self.model, passed, len(batches)):
                tokens = batch.to(self.info.device)
                with torch.autocast(
                    self.info.device.partition(":")[0],
                    dtype=self.dtype,
                    enabled=self.dtype != torch.float32,
                ):
                    loss = self.model(input_ids=tokens, labels=tokens).loss / len(batches)
                self.scaler.scale(loss).backward()
                total += loss.detach().double()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return float(all_reduce(total, "average"))

    def _global_batches(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """This rank's part of one global batch after the other, epoch after epoch."""
        from torch.utils.data import DataLoader

        for epoch in itertools.count(self.sampler.epoch):
            self.sampler.set_epoch(epoch)
            loader: DataLoader[torch.Tensor] = DataLoader(
                self.windows,  # type: ignore[arg-type] # a tensor has what a dataset needs
                batch_size=self.micro_batch,
                sampler=self.sampler,
                drop_last=True,
            )
            # A step at the end of an epoch for which there is not a whole batch is left out.
            passes = iter(loader)
            while len(step := tuple(itertools.islice(passes, self.args.accumulate))) == (
                self.args.accumulate
            ):
                yield step

    def _losses(self) -> contextlib.AbstractContextManager[Any]:
        if not self.info.is_main:
            return contextlib.nullcontext(io.StringIO())
        return open(self.args.output / "loss.jsonl", "a", encoding="utf-8")

    def _which(self) -> dict[str, Any]:
        info = self.info
        return {
            "world_size": info.world_size,
            "restart": info.restart,
            "requeue": info.requeue,
            "at": time.time(),
        }

    def _summary(self, first: int, loss: float | None, seconds: float) -> dict[str, Any]:
        import torch

        steps = max(0, self.args.steps - first)
        tokens = steps * self.args.batch_size * self.windows.shape[1]
        cuda = self.info.device.startswith("cuda")
        return {
            "steps": self.args.steps,
            "resumed_from": first,
            "loss": loss,
            "world_size": self.info.world_size,
            "backend": self.info.backend,
            "device": self.info.device,
            "precision": str(self.dtype).removeprefix("torch."),
            "seconds": round(seconds, 3),
            "tokens_per_s": round(tokens / seconds, 1),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        }


def batch_per_pass(args: argparse.Namespace, info: DistributedInfo) -> int:
    """Sequences of one pass of one rank."""
    if args.texts is not None and args.texts < 1:
        msg = f"--texts {args.texts} leaves nothing to learn from"
        raise HpcToolkitError(msg, hint="leave it out for all of them")
    if args.accumulate < 1:
        msg = f"--accumulate {args.accumulate} is not a number of forward passes above 0"
        raise HpcToolkitError(msg, hint="1 makes a step of each pass")
    passes = info.world_size * args.accumulate
    if args.batch_size % passes:
        msg = f"--batch-size {args.batch_size} has no equal part for each of {passes} passes a step"
        hint = f"{info.world_size} ranks times --accumulate {args.accumulate} must divide it"
        raise HpcToolkitError(msg, hint=hint)
    found: int = args.batch_size // passes
    return found


def check_texts(batch: int, sequences: int) -> None:
    """Refuse a batch that no epoch holds: the training would look for one for ever."""
    if batch > sequences:
        msg = f"--batch-size {batch} is more than the {sequences} sequences of the texts"
        raise HpcToolkitError(msg, hint="a smaller batch, or more --texts")


def token_windows(args: argparse.Namespace, info: DistributedInfo) -> torch.Tensor:
    """The texts as rows of token ids; rank 0 makes the file that all read."""
    import numpy as np
    import torch

    path = args.output / "data" / f"tokens-{args.texts or 'all'}.npy"
    if info.is_main and not path.is_file():
        from examples import mini_pythia

        texts = mini_pythia.training_texts()[: args.texts]
        rows = mini_pythia.token_windows(mini_pythia.train_tokenizer(texts), texts)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = io.BytesIO()
        np.save(data, rows, allow_pickle=False)
        replace_file(path, [data.getvalue()])
    if info.backend:
        torch.distributed.barrier()
    return torch.from_numpy(np.load(path, allow_pickle=False))


def autocast_dtype(precision: str, device: str) -> torch.dtype:
    """What matrices are multiplied in; weights and their updates stay in float32."""
    import torch

    cuda = device.startswith("cuda")
    if precision == "auto":
        precision = "float32"
        if cuda:
            precision = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    if precision == "fp16" and not cuda:
        msg = "--precision fp16 needs a GPU"
        raise HpcToolkitError(msg, hint="use bf16, float32 or auto")
    return {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def make_model(name: str) -> torch.nn.Module:
    """The demo's GPT-NeoX of that name, or "plain": a decoder of torch alone, quicker to import."""
    from examples import mini_pythia

    if name == "plain":
        from examples.plain_decoder import PlainDecoder

        return PlainDecoder(mini_pythia.VOCABULARY)
    from transformers import GPTNeoXForCausalLM

    size = mini_pythia.SIZES[name]
    model: torch.nn.Module = GPTNeoXForCausalLM(
        mini_pythia.model_config(size, mini_pythia.VOCABULARY)
    )
    return model


if __name__ == "__main__":
    leave(main())
