#!/bin/sh
# Installs what is missing, builds the release and runs all tests. Arguments go to ctest:  scripts/test.sh -R tokenizer
set -eu
cd "$(dirname "$0")/.."
scripts/setup.sh
scripts/build.sh release
exec ctest --preset release "$@"
