#!/bin/bash
# The week of somebody who wants to know how many GPUs a training is worth.
set -eu
REPEATS=${REPEATS:-3}

# Monday. A recorder in the loop of my training measures it. This one is a stand-in that only waits.
cat >mytrain.py <<'END'
import time

from hpc_toolkit.training.scaling.recorder import Recorder

recorder = Recorder(batch_per_rank=32)
for step in range(20):
    time.sleep(0.01)  # load, forward, backward, optimizer
    recorder.step(loss=1 / (step + 1))
recorder.finish()
END
# Look at what would be measured first. Then see which size is worth its price.
hpctk scaling run -o runs/mine --world-sizes 1,2 --repeats "$REPEATS" --dry-run -- mytrain.py
hpctk scaling run -o runs/mine --world-sizes 1,2 --repeats "$REPEATS" \
    --price-per-gpu-hour 1.5 -- mytrain.py # first result
# For the group's page.
hpctk scaling analyze runs/mine --price-per-gpu-hour 1.5 >scaling.md

# Wednesday. What the trainings of a paper cost: 60 of 8 hours each on GPUs at 2 per hour, due in a week.
hpctk plan --items 60 --item-time 8h --cluster killarney --nodes 1,2,4,8 --within 7d --price-per-gpu-hour 2

# Thursday. The same on a cluster, one job for each size; without a Slurm the week ends here.
sinfo >/dev/null 2>&1 || exit 0
hpctk submit train-multi-node --nodes 1 --time 10 -- mytrain.py
hpctk submit train-multi-node --nodes 2 --time 10 -- mytrain.py
# When the jobs have ended (squeue --me).
hpctk scaling analyze slurm/logs --price-per-gpu-hour 1.5
