#!/usr/bin/env bash
# Installs what the tests need beside Python packages: a C++ compiler and the headers of libibverbs for the native modules;
# QEMU, a kernel and RDMA tools for the guests of rdma_vm.sh, unless MONARCH_SLURM_TEST_NO_RDMA=1;
# Slurm, munge and MariaDB for the cluster of slurm_cluster.sh, unless MONARCH_SLURM_TEST_NO_SLURM=1.
# As root, or as a user who may sudo. Does nothing when all is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if ! command -v apt-get >/dev/null; then
    echo "error: this needs apt-get (Debian, Ubuntu); elsewhere install what this script names by hand" >&2
    exit 1
fi
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

install() {
    local package missing=""
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    echo "installing with apt-get:$missing"
    as_root apt-get update -qq || return
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

# The names of the kernel's packages are as old as apt's lists.
prepare_guests() { bash rdma_vm.sh --prepare || { as_root apt-get update -qq && bash rdma_vm.sh --prepare; }; }

install g++ libibverbs-dev python3-dev

if [ "${MONARCH_SLURM_TEST_NO_RDMA:-}" = 1 ]; then
    echo "MONARCH_SLURM_TEST_NO_RDMA=1: the tests in guests with a soft-RoCE device will be skipped"
else
    read -ra guest_packages < <(bash rdma_vm.sh packages)
    { install "${guest_packages[@]}" && prepare_guests; } ||
        echo "warning: QEMU, or a kernel for its guests, cannot be had here: the tests with a soft-RoCE device will be skipped" >&2
fi

if [ "${MONARCH_SLURM_TEST_NO_SLURM:-}" = 1 ]; then
    echo "MONARCH_SLURM_TEST_NO_SLURM=1: the tests on a Slurm cluster will be skipped"
else
    as_root bash slurm_cluster.sh install
fi
