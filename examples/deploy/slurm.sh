#!/bin/bash
# Four jobs, each a peer with a folder of its own in ~/p2p-diloco. main.invite and train.py lie in ~/p2p-diloco, too:
#   sbatch examples/deploy/slurm.sh
# The same line goes on with the run when time is up. Several GPUs in a job: -- torchrun --nproc-per-node 8 ../train.py
#SBATCH --job-name=p2p-diloco
#SBATCH --array=0-3
#SBATCH --gres=gpu:1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append

set -e
mkdir -p "$HOME/p2p-diloco/$SLURM_ARRAY_TASK_ID"
cd "$HOME/p2p-diloco/$SLURM_ARRAY_TASK_ID"
exec p2p-diloco join --invite ../main.invite --name "peer-$SLURM_ARRAY_TASK_ID" --identity-path identity.key \
    --checkpoint-dir checkpoints --logs plain -- python ../train.py
