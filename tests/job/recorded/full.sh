#!/bin/bash

# Parameters
#SBATCH --account=physics
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
#SBATCH --signal=USR2@30
#SBATCH --time=2

# setup
#SBATCH --constraint=mi300
#SBATCH -C 'fast fabric'
#SBATCH '--comment=two words'
#SBATCH --reservation maintenance
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
[ -z "${SLURM_RESTART_COUNT:-}" ] || rm -f '/shared/my runs/JOB_FOLDER/exit_code' '/shared/my runs/JOB_FOLDER/controller.json'
module load rocm
export NCCL_DEBUG=WARN

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output '/shared/my runs/JOB_FOLDER/submitit/%j_%t_log.out' '--output=/shared/my runs/JOB_FOLDER/logs/%N.log' --open-mode=append --no-kill --kill-on-bad-exit=0 --wait=0 --overlap --mpi=none --cpu-bind=none --cpus-per-task=96 apptainer exec rocm.sif python -u -m submitit.core._submit '/shared/my runs/JOB_FOLDER/submitit'


# teardown
code=$?
[ ! -s '/shared/my runs/JOB_FOLDER/exit_code' ] || code="$(cat '/shared/my runs/JOB_FOLDER/exit_code')"
exit "$code"