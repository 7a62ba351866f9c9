#!/bin/bash
# The week of somebody who looks for the layers of Pythia's checkpoints with the best embeddings.
# CAMPAIGN=rehearsal.toml works through it with made-up scores, without a network or a GPU.
set -eu
CAMPAIGN=${CAMPAIGN:-pythia.toml} STEPS=${STEPS:-0,1000:143000:1000} BUDGET=${BUDGET:-200}
NODES=${NODES:-8} GPUS=${GPUS:-4}

# Monday. Two tasks of mteb on all layers of three sizes: how many evaluations are there, and how many hours?
cat >pythia.toml <<END
name = "pythia"

[[models]]
pythia = ["14m", "70m", "410m"]
steps = "$STEPS"
layers = "blocks"

[tasks]
names = ["STSBenchmark", "Banking77Classification.v2"]
seconds = { STSBenchmark = 40, "Banking77Classification.v2" = "2min" }

[search]
budget = $BUDGET
pending = 16 # 32 evaluations for 32 GPUs
END
hpctk campaign plan pythia.toml --workers $((NODES * GPUS))

# Tuesday. Rehearse with a made-up score, on this machine: does the search find what is best?
cat >rehearsal.py <<'END'
def score(item):
    step = int(item["checkpoint"].partition("step")[2])
    return {"score": step / 143000 - (item["layer"] - 4) ** 2 / 100}
END
sed '/^\[tasks\]/a workload = "rehearsal:score"' pythia.toml >rehearsal.toml
sed '$a exhaustive = true' rehearsal.toml >all.toml
hpctk campaign run all.toml --run runs/all --workers 2 # first result

# Wednesday. The real one. The run keeps the settings; look at the job before it is sent.
hpctk init runs/pythia --campaign "$CAMPAIGN"
hpctk submit campaign --run runs/pythia --nodes "$NODES" --gpus-per-node "$GPUS" --time 8:00:00 --dry-run
# Compute nodes often have no network: download the checkpoints here first.
[ "$CAMPAIGN" = rehearsal.toml ] || hpctk items fetch "$CAMPAIGN"
# Without a Slurm the campaign runs here.
if sinfo >/dev/null 2>&1; then
    hpctk submit campaign --run runs/pythia --nodes "$NODES" --gpus-per-node "$GPUS" --time 8:00:00
    hpctk status runs/pythia --watch
else
    hpctk campaign run "$CAMPAIGN" --run runs/pythia --workers 2
fi

# Thursday. One more task, my own, and a larger budget; what is known is not evaluated again.
cat >headlines.py <<'END'
from mteb.abstasks import AbsTaskClassification
from mteb.abstasks.task_metadata import TaskMetadata


class Headlines(AbsTaskClassification):  # reads headlines/train.csv and headlines/test.csv: text,label
    metadata = TaskMetadata(
        name="Headlines",
        description="Topic of a headline.",
        type="Classification",
        category="t2c",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="accuracy",
        dataset={"path": "headlines", "revision": "1"},
    )
END
sed -e '/^\[tasks\]/a from = "runs/pythia"' -e 's/^names = \[/&"headlines:Headlines", /' \
    -e 's/^seconds = {/& "headlines:Headlines" = 60,/' -e "s/^budget = .*/budget = $((BUDGET * 3 / 2))/" \
    "$CAMPAIGN" >more.toml
hpctk campaign plan more.toml --workers $((NODES * GPUS))
hpctk campaign run more.toml --run runs/more --workers 2

# Friday. The best layer, the last layers beside it, and a table for the paper.
hpctk status runs/more
hpctk gather runs/pythia -o scores.csv
hpctk gather runs/more -o more.csv
