"""Native modules are compiled here with warnings as errors."""

import os

os.environ["MONARCH_SLURM_NATIVE_STRICT"] = "1"
