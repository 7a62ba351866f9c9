"""A training to copy: replace the data, the model and the loss, and keep the rest.

hpctk launch --nproc-per-node 2 --run-dir runs/first train.py
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpc_toolkit.training import distributed

RUN_DIR = os.environ.get("HPCTK_RUN_DIR", "runs/first")
LOADER = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}


def main(epochs: int = 20, batch: int = 64, log_every: int = 80, save_every: int = 100) -> int:
    with distributed.process_group() as info, distributed.StopSignal() as stop:
        kind = info.device.partition(":")[0]  # cuda or cpu
        numbers = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(numbers, numbers.mean(dim=1, keepdim=True))
        torch.manual_seed(info.rank)  # for dropout: all ranks start with the weights of rank 0
        model = distributed.wrap_model(nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sampler = distributed.ResumableSampler(data)
        # With a generator of its own, the loader does not change the random numbers of dropout.
        own = {"sampler": sampler, "pin_memory": kind == "cuda", "generator": torch.Generator()}
        loader = DataLoader(data, batch // info.world_size, **LOADER | own)
        parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
        checkpoints = distributed.Checkpoints(f"{RUN_DIR}/checkpoints", parts, every=save_every)
        restored = checkpoints.restore()
        step, taken, began = restored.step if restored else 0, 0, time.perf_counter()
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for tensors in loader:
                x, y = (tensor.to(info.device, non_blocking=True) for tensor in tensors)
                with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                    loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step, taken = step + 1, taken + len(x) * info.world_size
                sampler.took(len(x) * info.world_size)
                if step % log_every == 0:
                    mean, now = distributed.all_reduce(loss, "average").item(), time.perf_counter()
                    rate, taken, began = taken / (now - began), 0, now
                    if info.is_main:
                        print(f"epoch {epoch} step {step} loss {mean:.9g} samples/s {rate:.0f}")
                if stop.agreed(saving_s=checkpoints.saving_s) or checkpoints.due(step):
                    checkpoints.save(step)
                if stop.stopping:
                    return distributed.TRY_AGAIN
        checkpoints.save(step)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
