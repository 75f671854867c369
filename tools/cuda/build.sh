#!/bin/sh
# Builds op_check with nvcc alone: tools/cuda/build.sh OUT_FILE. JOBS objects at a time.
set -e
cd "$(dirname "$0")/../.."
out=${1:-build/op_check}
objects=$(mktemp -d)
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
jobs=${JOBS:-2}
ls src/backends/cuda/*.cu tools/cuda/*.cu | xargs -P "$jobs" -I{} sh -c \
  "$nvcc -std=c++20 -O3 -lineinfo -Xptxas -v -gencode=arch=compute_90a,code=sm_90a -I. -Isrc -c {} -o $objects/\$(basename {}).o > $objects/\$(basename {}).log 2>&1 || { cat $objects/\$(basename {}).log; exit 1; }"
# Spilled registers and serialised matrix instructions are worth a look; the rest of the report is not.
grep -hE 'warning|[1-9][0-9]* bytes spill' "$objects"/*.log || true
mkdir -p "$(dirname "$out")"
$nvcc -gencode=arch=compute_90a,code=sm_90a "$objects"/*.o -o "$out"
rm -r "$objects"
