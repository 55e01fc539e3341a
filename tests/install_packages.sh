#!/usr/bin/env bash
# Installs what the tests need beside Python packages: Slurm, munge and MariaDB, for the cluster of slurm_cluster.sh.
# As root, or as a user who may sudo. Does nothing when all is there, or when MONARCH_SLURM_TEST_NO_SLURM=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if [ "${MONARCH_SLURM_TEST_NO_SLURM:-}" = 1 ]; then
    echo "MONARCH_SLURM_TEST_NO_SLURM=1: the tests on a Slurm cluster will be skipped"
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "error: this needs apt-get (Debian, Ubuntu); set MONARCH_SLURM_TEST_NO_SLURM=1 to test without Slurm" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    exec bash slurm_cluster.sh install
fi
echo "installing Slurm with sudo"
exec sudo bash slurm_cluster.sh install
