"""Steps of one training under plain torchrun, for scaling_ranks.py: nothing measures its parts.

    torchrun --standalone --nproc-per-node 2 benchmarks/plain_ddp.py --steps 40

Torch's own launcher, DistributedDataParallel (with one rank none) and AdamW on the model that
'hpctk scaling run' has by default, with the same batch of all ranks together. Rank 0 prints one
JSON line: the samples of all ranks in a second, over all steps, at the slowest rank.

Takes a few seconds. Needs torch.
"""

from __future__ import annotations

import json
import os
import time

import torch
import torch.distributed as dist
from arguments import number, parser

from hpc_toolkit.training.scaling.measurement import make_model
from hpc_toolkit.training.scaling.settings import Settings


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--steps", type=number, default=20, help="that count")
    given.add_argument("--warmup", type=number, default=5, help="steps before")
    options = given.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, settings = dist.get_world_size(), Settings()
    torch.manual_seed(1)
    model, vocabulary = make_model(settings, torch.device("cpu"))
    trained = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    shape = (settings.batch_per_rank(ranks), settings.seq_length + 1)

    def steps(count: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            ids = torch.randint(vocabulary, shape)
            scores = trained(ids[:, :-1])
            targets = ids[:, 1:].flatten()
            torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    steps(options.warmup)
    slowest = torch.tensor(steps(options.steps), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        rate = settings.batch_size * options.steps / slowest.item()
        print(json.dumps({"samples_per_s": rate}), flush=True)
    dist.destroy_process_group()
    # A thread of gloo may still want the interpreter, and would end this rank by SIGABRT.
    os._exit(0)


if __name__ == "__main__":
    main()
