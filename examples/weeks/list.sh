#!/bin/bash
# The week of somebody who repeats a benchmark 500 times on 10 workers.
set -eu
COUNT=${COUNT:-500} WORKERS=${WORKERS:-10} NODES=${NODES:-2}

# Monday. The benchmark is a function: an item in, a dictionary out.
cat >bench.py <<'END'
import random
import time


def iterate(item):
    draw = random.Random(item["seed"])
    numbers = [draw.random() for _ in range(50_000)]
    began = time.perf_counter()
    numbers.sort()
    return {"seconds": time.perf_counter() - began}
END
# Run all iterations here, check that no result is missing, and write a table.
hpctk map bench:iterate --count "$COUNT" --key seed --workers "$WORKERS" -o results.csv # first result
# Look at where everything is, and what one iteration did.
hpctk status runs/bench-iterate
hpctk explain runs/bench-iterate --item 7

# Tuesday. The benchmark is a program, and some of its iterations fail.
cat >bench.sh <<'END'
[ "$1" != 13 ] || { echo "no such seed: $1"; exit 3; }
echo "{\"score\": $(($1 * $1 % 97))}"
END
hpctk init runs/program --command 'sh bench.sh {seed}' --count "$COUNT" --key seed --timeout 5min
# Run one iteration in the foreground before all of them.
hpctk try runs/program --item 7
# The command ends although an iteration fails; the status says which error it was.
hpctk work runs/program --workers "$WORKERS"
hpctk status runs/program
hpctk logs runs/program --item 13
# Correct the program and run only what failed.
sed -i 1d bench.sh
hpctk retry runs/program
hpctk work runs/program --workers "$WORKERS"
hpctk status runs/program --check
hpctk gather runs/program -o program.csv

# Wednesday. The laptop is closed in the middle; the same command continues.
hpctk init runs/long --workload bench:iterate --count "$COUNT" --key seed
timeout -s KILL 2 hpctk work runs/long --workers "$WORKERS" || true
hpctk status runs/long
hpctk work runs/long --workers "$WORKERS"
hpctk gather runs/long -o long.csv

# Thursday. The same on a cluster: how long on how many nodes, and what does the job request?
hpctk init runs/cluster --workload bench:iterate --count "$COUNT" --key seed
hpctk plan runs/cluster --item-time 20s --workers-per-node $((WORKERS / NODES)) --nodes 1,2,4
hpctk submit --run runs/cluster --nodes "$NODES" --ntasks-per-node $((WORKERS / NODES)) --dry-run
sinfo >/dev/null 2>&1 || exit 0 # without Slurm the week ends here
hpctk submit --run runs/cluster --nodes "$NODES" --ntasks-per-node $((WORKERS / NODES))

# Friday. Wait for the job, and write its table.
hpctk status runs/cluster --watch
hpctk gather runs/cluster -o cluster.csv
