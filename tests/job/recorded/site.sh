#!/bin/bash

# Parameters
#SBATCH --comment='two words'
#SBATCH --dependency=afterok:12
#SBATCH --exclusive
#SBATCH --gres=nvme:1
#SBATCH --job-name=monarch_job
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --nodelist='n[1-4]'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/JOB_FOLDER/batch.log
#SBATCH --signal=B:USR2@300

# setup
type module >/dev/null 2>&1 || . /etc/profile
module load rocm/6.4 || exit 1
module load gcc || exit 1
. '/shared/my env/bin/activate' || exit 1
export NCCL_DEBUG=WARN
export MESSAGE='it'"'"'s here'
ulimit -n 65536
if [ -n "${PYTHONPATH-}" ]; then
    export MONARCH_SLURM_PYTHONPATH=$PYTHONPATH
    PYTHONPATH=$(tr : '\n' <<< "$PYTHONPATH" | grep ^/ | paste -sd: -)
fi

# command
export SUBMITIT_EXECUTOR=slurm
exec python -u -c 'import sys; sys.path[:] = filter(None, sys.path); from monarch_slurm.interpreter import run_module; run_module()' monarch_slurm.job.submitted /shared/runs/JOB_FOLDER/submitit
