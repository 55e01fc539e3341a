"""Puts the C++ sources of ``native/`` into the package for `monarch_slurm.native_build`. Compiles nothing."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["monarch_slurm*"]), "monarch_slurm.native_sources"],
    package_dir={"monarch_slurm.native_sources": "native"},
    package_data={  # replaces setup.cfg's
        "monarch_slurm": ["py.typed", "train/assets/*"],
        "monarch_slurm.native_sources": ["src/*.cpp", "src/*.h", "include/*.h", "include/*/*.h"],
    },
)
