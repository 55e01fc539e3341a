#!/usr/bin/env bash
# Fetches the vendors' own declarations of what the native modules open at run time, for test_vendor_headers.py:
# CUDA's headers, HIP's (in the triton wheel), and what NVIDIA's and AMD's Python bindings say of NCCL and RCCL. Only those
# files are kept (10 MB); nothing is installed. With MONARCH_SLURM_TEST_NCCL=1 the real NCCL, too (300 MB). On Debian and
# Ubuntu also their HIP runtime (20 MB; 50 where LLVM 15 is not installed), for test_hip_runtime.py.
#
#   vendor_headers.sh PYTHON FOLDER
set -euo pipefail
python=$1 folder=$2

# wheel VERSION PATTERN: the files that match, below FOLDER/<name>
fetch() {
    local name=$1 version=$2 pattern=$3 scratch
    [ -e "$folder/$name-$version" ] && return
    scratch=$(mktemp -d)
    "$python" -m pip download --quiet --no-deps --no-cache-dir --dest "$scratch" --only-binary :all: --implementation cp \
        --python-version 3.11 --abi cp311 --abi none --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
        --platform manylinux_2_24_x86_64 --platform manylinux_2_18_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 "$name==$version"
    mkdir -p "$folder/$name"
    "$python" - "$scratch"/*.whl "$pattern" "$folder/$name" <<'PY'
import fnmatch, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[3], [name for name in wheel.namelist() if fnmatch.fnmatch(name, sys.argv[2])])
PY
    rm -rf "$scratch"
    touch "$folder/$name-$version"
}

fetch nvidia-cuda-runtime 13.5.37 'nvidia/*/include/*'
fetch triton 3.9.0 'triton/backends/amd/include/*'
fetch nccl4py 0.6.0 'nccl/bindings/*.pxd'
fetch rocm-bindings-systems 10.0.0.0.1.2 'rocm/bindings/*.pxd'
if [ "${MONARCH_SLURM_TEST_NCCL:-}" = 1 ]; then
    fetch nvidia-nccl-cu13 2.32.3 'nvidia/nccl/*'
fi

# The distribution's HIP runtime, with what it needs and is not installed: unpacked below FOLDER/hip.
fetch_hip() {
    local packages scratch deb
    [ -e "$folder/hip-5.2" ] && return
    command -v apt-get >/dev/null || return 0
    packages=$(apt-get install --simulate --no-install-recommends --yes libamdhip64-5 2>/dev/null | awk '/^Inst/ { print $2 }')
    scratch=$(mktemp -d)
    # shellcheck disable=SC2086
    if [ -z "$packages" ] || ! (cd "$scratch" && apt-get download -qq $packages 2>/dev/null); then
        echo "warning: apt-get has no libamdhip64-5 here: the test with a real HIP runtime will be skipped" >&2
        rm -rf "$scratch"
        return 0
    fi
    for deb in "$scratch"/*.deb; do dpkg-deb -x "$deb" "$folder/hip"; done
    rm -rf "$scratch"
    touch "$folder/hip-5.2"
}
fetch_hip
