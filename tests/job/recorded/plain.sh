#!/bin/bash

# Parameters
#SBATCH --exclusive
#SBATCH --job-name=monarch_job
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/JOB_FOLDER/batch.log
#SBATCH --signal=USR2@60

# setup
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /shared/runs/JOB_FOLDER/submitit/%j_%t_log.out --output=/shared/runs/JOB_FOLDER/logs/%N.log --open-mode=append --no-kill --kill-on-bad-exit=0 --wait=0 --overlap --mpi=none --cpu-bind=none python -u -m submitit.core._submit /shared/runs/JOB_FOLDER/submitit


# teardown
code=$?
[ ! -s /shared/runs/JOB_FOLDER/exit_code ] || code="$(cat /shared/runs/JOB_FOLDER/exit_code)"
exit "$code"