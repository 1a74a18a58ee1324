#!/bin/bash
# A run of several nodes under Slurm: sbatch deploy/slurm.sh RECIPE RUN
# One torchrun a node starts a rank for each GPU. RECIPE, RUN, model and rows lie on a file system that all nodes share.
# A job that was requeued, or is submitted again with the same RUN, goes on from the last finished round.
#SBATCH --job-name=fedkseed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --requeue
set -euo pipefail
recipe=$1 run=$2
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ -f "$run/run.sqlite" ]; then
  work=(resume "$run")
else
  work=(run "$recipe" --output "$run")
fi
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
  -m fedkseed "${work[@]}" --engine torch
