#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --comment='two words'
#SBATCH --constraint='fast fabric'
#SBATCH --cpus-per-task=96
#SBATCH --gpus-per-node=8
#SBATCH --job-name='night run'
#SBATCH --mem=500G
#SBATCH --no-kill
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/shared/my runs/JOB_FOLDER/batch.log'
#SBATCH --partition=mi300
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --reservation=maintenance
#SBATCH --signal=B:USR2@30
#SBATCH --time=2

# setup
module load rocm
export NCCL_DEBUG=WARN
if [ -n "${PYTHONPATH-}" ]; then
    export MONARCH_SLURM_PYTHONPATH=$PYTHONPATH
    PYTHONPATH=$(tr : '\n' <<< "$PYTHONPATH" | grep ^/ | paste -sd: -)
fi

# command
export SUBMITIT_EXECUTOR=slurm
exec apptainer exec rocm.sif python -u -c 'import sys; sys.path[:] = filter(None, sys.path); from monarch_slurm.interpreter import run_module; run_module()' monarch_slurm.job.submitted '/shared/my runs/JOB_FOLDER/submitit'
