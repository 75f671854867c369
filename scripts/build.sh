#!/bin/sh
# Configures and builds one preset (default: release), with as many jobs as cores and memory allow.
#
#   scripts/build.sh [PRESET [TARGET...]]
set -eu
cd "$(dirname "$0")/.."
preset="${1:-release}"
[ $# -eq 0 ] || shift

cores=$(nproc)
if [ -r /sys/fs/cgroup/cpu.max ]; then
  read -r quota period < /sys/fs/cgroup/cpu.max || true
  if [ "${quota:-max}" != max ]; then
    limit=$(((quota + period - 1) / period))
    [ "$limit" -ge "$cores" ] || cores=$limit
  fi
fi
# The largest translation units (HTTP) need about 1 GiB each.
memory_gib=$(awk '/^MemTotal:/ {print int($2 / 1048576)}' /proc/meminfo)
[ "$memory_gib" -ge 1 ] || memory_gib=1
[ "$cores" -le "$memory_gib" ] || cores=$memory_gib
[ "$cores" -ge 1 ] || cores=1

cmake --preset "$preset" --log-level=WARNING
if [ $# -eq 0 ]; then
  cmake --build --preset "$preset" -j "${JOBS:-$cores}"
else
  cmake --build --preset "$preset" -j "${JOBS:-$cores}" --target "$@"
fi
