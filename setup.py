"""Puts ``native/`` and ``sbatch_templates/`` into the package, for `monarch_slurm.native_build` and
`monarch_slurm.job.templates`. Compiles nothing.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["monarch_slurm*"]),
        "monarch_slurm.native_sources",
        "monarch_slurm.sbatch_templates",
    ],
    package_dir={"monarch_slurm.native_sources": "native", "monarch_slurm.sbatch_templates": "sbatch_templates"},
    package_data={  # replaces setup.cfg's
        "monarch_slurm": ["py.typed", "train/assets/*"],
        "monarch_slurm.sbatch_templates": ["*.sbatch"],
        "monarch_slurm.native_sources": ["src/*.cpp", "src/*.h", "include/*.h", "include/*/*.h"],
    },
)
