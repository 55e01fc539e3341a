"""See `monarch_slurm.tools`."""
