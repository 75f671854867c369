#!/bin/sh
# Installs what is missing, builds the release and runs all tests. Arguments go to ctest:  scripts/test.sh -R tokenizer
# --offline (first) leaves out the tests that need packages of PyPI, and names them at the end.
set -eu
cd "$(dirname "$0")/.."
offline=""
if [ "${1:-}" = --offline ]; then
  offline=yes
  shift
fi
scripts/setup.sh
scripts/build.sh release
if [ -n "$offline" ]; then
  rc=0
  ctest --preset release -LE pypi "$@" || rc=$?
  echo "test: LEFT OUT (--offline; they need packages of PyPI: clients of the API, lm-eval, libucx-cu12):"
  ctest --preset release -N -L pypi 2> /dev/null | sed -n 's/^ *Test *#[0-9]*: /  /p'
  exit "$rc"
fi
log=build/release/Testing/run.log
mkdir -p build/release/Testing
{ rc=0; ctest --preset release "$@" 2>&1 || rc=$?; echo "$rc" > "$log.rc"; } | tee "$log"
rc=$(cat "$log.rc")
without=$(sed -n 's/.*: \([a-z_]*_venv\) \.*\*\*\*.*/\1/p' "$log" | sort -u)
if [ -n "$without" ]; then
  echo "test: NOT RUN, because packages of PyPI could not be fetched ($(echo $without); their output is above):"
  grep 'Not Run' "$log" | sed -n 's/^[[:space:]]*[0-9]* - \([a-z_A-Z0-9]*\) (Not Run).*/  \1/p'
  echo "test: everything else ran. Without a way to PyPI: scripts/test.sh --offline"
fi
exit "$rc"
