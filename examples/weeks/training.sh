#!/bin/bash
# The week of somebody who trains on several GPUs, from a laptop to two nodes.
set -eu
STEPS=${STEPS:-3000} NODES=${NODES:-2} RANKS=${RANKS:-2}

# Monday. The training is a script of PyTorch; the lines with "distributed" are those for several ranks.
cat >train.py <<'END'
import itertools
import os
import sys

import torch

from hpc_toolkit.training import distributed

steps = int(sys.argv[1])
with distributed.process_group() as info, distributed.StopSignal() as stop:
    data = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
    model = distributed.wrap_model(torch.nn.Linear(8, 1).to(info.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = distributed.ResumableSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=32 // info.world_size, sampler=sampler)
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    where = os.environ.get("HPCTK_RUN_DIR", "runs/alone")
    checkpoints = distributed.Checkpoints(f"{where}/checkpoints", parts, every=steps // 10)
    restored = checkpoints.restore()
    step = restored.step if restored else 0
    if info.is_main:
        print("first step", step + 1, "on", info.world_size, "ranks", flush=True)
    for epoch in itertools.count(sampler.epoch):
        sampler.set_epoch(epoch)
        for batch in itertools.islice(loader, steps - step):
            loss = (model(batch.to(info.device)).squeeze() - batch.sum(dim=1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            sampler.took(32)
            if checkpoints.due(step):
                checkpoints.save(step)
                if info.is_main:
                    print("step", step, "loss", loss.item(), flush=True)
            if stop.agreed(saving_s=checkpoints.saving_s):
                checkpoints.save(step)
                raise SystemExit(distributed.TRY_AGAIN)
        if step == steps:
            break
END
# Two ranks on this machine. The last line names the latest checkpoint and the next command.
hpctk launch --nproc-per-node "$RANKS" --run-dir runs/first train.py "$STEPS" # first result

# Tuesday. What happens when a rank dies? Kill one after the first checkpoint: all start again from there.
hpctk launch --nproc-per-node "$RANKS" --max-restarts 1 --run-dir runs/here train.py "$STEPS" &
launch=$!
while kill -0 $launch && ! ls runs/here/checkpoints/*.pt >/dev/null 2>&1; do sleep 0.1; done
kill -9 "$(pgrep -P $launch | tail -n 1)"
wait $launch
# Where does it stand, and what did the ranks print? docs/how-to/training-troubles.md goes by symptoms.
hpctk status runs/here
hpctk logs runs/here

# Wednesday. Before a cluster: the command and the variables of a rank. For a debugger: python train.py 20
hpctk launch --dry-run --nproc-per-node "$RANKS" train.py "$STEPS"
# The job script for two nodes, and what a cluster without hpctk would get.
hpctk render train-multi-node --nodes "$NODES" --nproc-per-node "$RANKS" --run-dir runs/there -- train.py "$STEPS"
hpctk render train-multi-node --nodes "$NODES" --nproc-per-node "$RANKS" --plain -o plain.sbatch -- train.py "$STEPS"

# Thursday. Rehearse the job on a Slurm of my own; without Slurm's programs the week ends here.
command -v slurmctld >/dev/null || exit 0
hpctk lab up --nodes "$NODES"
eval "$(hpctk lab env)"
hpctk submit slurm/train-multi-node.sbatch >job.txt
# Interrupt it as a preemption would: the ranks save, and the job starts again and continues from there.
while [ -n "$(squeue -h)" ] && ! ls runs/there/checkpoints/*.pt >/dev/null 2>&1; do sleep 0.1; done
scontrol requeue "$(cat job.txt)"
while [ -n "$(squeue -h)" ]; do sleep 0.2; done # or look: hpctk status runs/there --watch
hpctk status runs/there
hpctk logs runs/there
hpctk lab down
unset SLURM_CONF

# Friday. The same on a cluster that hpctk knows; without --dry-run it is submitted.
hpctk cluster list
hpctk submit train-multi-node --cluster killarney --account def-me --nodes 2 --gpus-per-node 4 --time 12:00:00 \
    --run-dir runs/large --dry-run -- train.py "$STEPS"
