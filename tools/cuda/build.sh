#!/bin/sh
# Builds op_check with nvcc alone: tools/cuda/build.sh OUT_FILE. One object at a time, so that a small machine can do it.
set -e
cd "$(dirname "$0")/../.."
out=${1:-build/op_check}
objects=$(mktemp -d)
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
jobs=${JOBS:-2}
ls src/backends/cuda/*.cu tools/cuda/*.cu | xargs -P "$jobs" -I{} sh -c \
  "$nvcc -std=c++20 -O3 -lineinfo -gencode=arch=compute_90a,code=sm_90a -I. -Isrc -c {} -o $objects/\$(basename {}).o"
mkdir -p "$(dirname "$out")"
$nvcc -gencode=arch=compute_90a,code=sm_90a "$objects"/*.o -o "$out"
rm -r "$objects"
