#!/usr/bin/env bash
# Installs what the tests need beside Python packages: a C++ compiler and the headers of libibverbs for the native modules;
# Slurm, munge and MariaDB for the cluster of slurm_cluster.sh, unless MONARCH_SLURM_TEST_NO_SLURM=1.
# As root, or as a user who may sudo. Does nothing when all is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if ! command -v apt-get >/dev/null; then
    echo "error: this needs apt-get (Debian, Ubuntu); elsewhere install what this script names by hand" >&2
    exit 1
fi
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

missing=""
for package in g++ libibverbs-dev python3-dev; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
if [ -n "$missing" ]; then
    echo "installing with apt-get:$missing"
    as_root apt-get update -qq
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

if [ "${MONARCH_SLURM_TEST_NO_SLURM:-}" = 1 ]; then
    echo "MONARCH_SLURM_TEST_NO_SLURM=1: the tests on a Slurm cluster will be skipped"
else
    as_root bash slurm_cluster.sh install
fi
