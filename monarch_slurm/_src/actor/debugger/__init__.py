"""See `monarch_slurm._src`."""
