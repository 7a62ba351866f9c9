#!/bin/bash
# The first week of somebody who has never used a cluster.
set -eu
COUNT=${COUNT:-50} NODES=${NODES:-2}

# Monday. The first run: any Python function, called once for each number.
cat >squares.py <<'END'
def square(item):
    return {"square": item["index"] ** 2}
END
hpctk map squares:square --count "$COUNT" -o squares.csv # first result
head -n 3 squares.csv
# Which commands are there, and is this machine all right?
hpctk --help
hpctk doctor .

# Tuesday. The same in small steps: create a run, try an item, work, look, write the table.
hpctk init runs/steps --workload squares:square --count "$COUNT"
hpctk try runs/steps --item 3
hpctk work runs/steps --workers 2
hpctk status runs/steps
hpctk gather runs/steps -o steps.csv

# Wednesday. A search: the best of 40 arms, 10 of them tried.
cat >boost.py <<'END'
import math


def score(item):
    return {"score": 1 - (math.log10(item["lr"]) + 1) ** 2 / 10 - (item["depth"] - 4) ** 2 / 50}
END
cat >boost.toml <<'END'
name = "boost"
[arms]
grid = { lr = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3], depth = "2:6" }
[tasks]
workload = "boost:score"
[search]
budget = 10
END
hpctk campaign plan boost.toml
hpctk campaign run boost.toml --workers 2

# Thursday. What is a job script? One with nothing of hpctk in it, to read and to keep.
cat >hello.py <<'END'
import os

print("task", os.environ.get("SLURM_PROCID"), "of", os.environ.get("SLURM_NTASKS"))
END
hpctk render command --nodes "$NODES" --plain -o hello.sbatch -- python hello.py
cat hello.sbatch

# Friday. A cluster to play with, on this machine; without Slurm's programs the week ends here.
command -v slurmctld >/dev/null || exit 0
hpctk lab up --nodes "$NODES"
eval "$(hpctk lab env)"
sinfo
sbatch --wait hello.sbatch
cat slurm/logs/command-*.out
# A list of items as a job: its ranks are the workers.
hpctk init runs/job --workload squares:square --count "$COUNT"
hpctk submit --run runs/job --nodes "$NODES" --ntasks-per-node 2
hpctk status runs/job --watch
hpctk gather runs/job -o job.csv
hpctk lab down
