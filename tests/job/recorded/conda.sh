#!/bin/bash

# Parameters
#SBATCH --exclusive
#SBATCH --job-name=monarch_job
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/JOB_FOLDER/batch.log
#SBATCH --signal=B:USR2@60

# setup
eval "$(conda shell.bash hook)" && conda activate train || exit 1

# command
export SUBMITIT_EXECUTOR=slurm
exec python -u -m submitit.core._submit /shared/runs/JOB_FOLDER/submitit
