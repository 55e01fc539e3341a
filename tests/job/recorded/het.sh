#!/bin/bash

# Parameters
#SBATCH --constraint=mi300x
#SBATCH --exclude=n7
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=monarch_job
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/JOB_FOLDER/batch.log
#SBATCH --partition=gpu
#SBATCH --reservation=night
#SBATCH --signal=B:USR2@60
#SBATCH --time=1-0

# setup
#SBATCH --switches=1
#SBATCH hetjob
#SBATCH --exclude=''
#SBATCH --mem=64G
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=cpu
#SBATCH --reservation=night
#SBATCH --signal=B:USR2@60
#SBATCH --time=1-0
#SBATCH --switches=1
#SBATCH --tmp=100G
#SBATCH hetjob
#SBATCH --exclude=''
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --reservation=night
#SBATCH --signal=B:USR2@60
#SBATCH --time=1-0
#SBATCH --switches=1
if [ -n "${PYTHONPATH-}" ]; then
    export MONARCH_SLURM_PYTHONPATH=$PYTHONPATH
    PYTHONPATH=$(tr : '\n' <<< "$PYTHONPATH" | grep ^/ | paste -sd: -)
fi

# command
export SUBMITIT_EXECUTOR=slurm
exec python -u -c 'import sys; sys.path[:] = filter(None, sys.path); from monarch_slurm.interpreter import run_module; run_module()' monarch_slurm.job.submitted /shared/runs/JOB_FOLDER/submitit
