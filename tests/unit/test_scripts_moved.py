"""Job scripts of guides and papers, and the commands that render what they do."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from hpc_toolkit.slurm.records import script_options
from tests.unit.jobcommands import call

SITE = """
max_walltime = "2-00:00:00"
gpus_per_node = 8
cpus_per_node = 64
mem_per_node = "480G"
container_runtime = "apptainer"
max_array_size = 1001
"""
MASKS = "mask_cpu:fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000"
IMAGE = "docker:nersc/pytorch:24.08"
HEAD = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
ACCELERATE = (
    "exec accelerate launch --num_machines $SLURM_JOB_NUM_NODES --machine_rank $SLURM_NODEID"
    f" --main_process_ip {HEAD} --main_process_port 29500 train.py"
)
DEEPSPEED = (
    "[ $SLURM_PROCID = 0 ] || exit 0; file=hostfile.$SLURM_JOB_ID; scontrol show hostnames |"
    ' sed "s/$/ slots=4/" > $file; exec deepspeed --hostfile $file train.py'
)
LINE = 'exec python train.py $(sed -n "${SLURM_ARRAY_TASK_ID}p" args.txt)'
GRID = "m=(a b); t=(x y z); i=$SLURM_ARRAY_TASK_ID; exec python eval.py ${m[i / 3]} ${t[i % 3]}"
SAVE = 'exec python train.py --out "$SCRATCH/$USER/$SLURM_JOB_ID"'

MULTI = "command --plain --nodes 4 --ntasks-per-node 1 --gpus-per-node 4"
EACH = {"nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "4", "cpus-per-task": "32"}
TRAP = {"signal": "B:SIGUSR1@120", "requeue": "", "time": "04:00:00", "open-mode": "append"}
MASKED = {"nodes": "4", "ntasks-per-node": "8", "gpus-per-node": "8", "cpus-per-task": "8"}
SHIFTER = f"command --plain --gpus-per-node 4 --sbatch image={IMAGE} --sbatch module=gpu,nccl"
NAMED_LOG = "slurm/logs/eval___layer_12__mean-bb325c96-%j.out"
NAMED = {"job-name": "eval / layer 12: mean", "output": NAMED_LOG}

MOVED: dict[str, tuple[str, list[str], dict[str, str], list[str]]] = {
    # name: (options of the command, its program, options of the script, parts of its last command)
    "torchrun over 4 nodes, rendezvous by host name": (
        "train-multi-node --plain --nodes 4 --gpus-per-node 4",
        ["train.py"],
        EACH,
        # The script has a port for each job, instead of one that two jobs on a node would share.
        ["torchrun", "--nproc-per-node=4", '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'],
    ),
    "a task for each GPU, with masks, in a container": (
        f"command --nodes 4 --gpus-per-node 8 --cpu-bind {MASKS} --container lumi.sif",
        ["python", "train.py"],
        MASKED,
        ["--apptainer=lumi.sif", f"--srun=--cpu-bind={MASKS}", "python train.py"],
    ),
    "shifter with image and modules": (
        SHIFTER,
        ["shifter", "python", "train.py"],
        {"image": IMAGE, "module": "gpu,nccl", "ntasks-per-node": "4"},
        ["shifter python train.py"],
    ),
    "requeue by a trap on USR1": (
        "train-single-gpu --time 4h --sbatch signal=B:SIGUSR1@120",
        ["train.py"],
        # hpctk requeues when the program, which gets the signal, exits with 75.
        TRAP,
        ["batch train", "launch", "train.py"],
    ),
    "checkpoints in a directory of the job": (
        "command --plain",
        ["bash", "-c", SAVE],
        {"ntasks-per-node": "1"},
        ["bash", f"'{SAVE}'"],
    ),
    "an array of 844 tasks, 12 at once": (
        "command --plain --array 0-843%12",
        ["bash", "-c", GRID],
        {"array": "0-843%12"},
        [f"'{GRID}'"],
    ),
    "the n-th line of a file are the arguments": (
        "command --plain --array 1-100",
        ["bash", "-c", LINE],
        {"array": "1-100"},
        [f"'{LINE}'"],
    ),
    "--wrap with an account and a hint": (
        "command --plain --account x@v100 --sbatch hint=nomultithread",
        ["python", "x.py"],
        {"account": "x@v100", "hint": "nomultithread"},
        ["python x.py"],
    ),
    "accelerate over 4 nodes": (MULTI, ["bash", "-c", ACCELERATE], EACH, [f"'{ACCELERATE}'"]),
    "DeepSpeed with a host file": (MULTI, ["bash", "-c", DEEPSPEED], EACH, [f"'{DEEPSPEED}'"]),
    "a job name with blanks and slashes": (
        "command --plain --job-name 'eval / layer 12: mean'",
        ["python", "x.py"],
        NAMED,
        ["python x.py"],
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_script_of_a_guide_is_rendered(tmp_path: Path, name: str) -> None:
    words, program, expected, command = MOVED[name]
    (tmp_path / "g.toml").write_text(SITE, encoding="utf-8")
    site = ("--cluster", tmp_path / "g.toml")
    done = call("render", *site, "-o", "-", *shlex.split(words), "--", *program)
    assert done.exit_code == 0, done.exception

    options = script_options(done.stdout)
    assert {key: options.get(key) for key in expected} == expected
    last = done.stdout.rpartition("\n\n")[2].replace(" \\\n  ", " ")
    assert [word for word in command if word not in last] == []
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
