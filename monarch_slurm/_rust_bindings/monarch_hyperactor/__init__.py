"""See `monarch_slurm._rust_bindings`."""
