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
#SBATCH --signal=B:USR2@60

# setup
if [ -n "${PYTHONPATH-}" ]; then
    export MONARCH_SLURM_PYTHONPATH=$PYTHONPATH
    PYTHONPATH=$(tr : '\n' <<< "$PYTHONPATH" | grep ^/ | paste -sd: -)
fi

# command
export SUBMITIT_EXECUTOR=slurm
exec python -u -c 'import sys; sys.path[:] = filter(None, sys.path); from monarch_slurm.interpreter import run_module; run_module()' monarch_slurm.job.submitted /shared/runs/JOB_FOLDER/submitit
