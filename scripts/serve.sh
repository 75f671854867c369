#!/bin/sh
# Installs what is missing, builds the release and serves the bundled model on http://127.0.0.1:30000.
# Arguments go to `sluice serve`:  scripts/serve.sh --port 8000 --model-path /models/GLM-5
set -eu
here=$(cd "$(dirname "$0")" && pwd)
"$here/setup.sh" build
"$here/build.sh" release sluice
exec "$here/../build/release/bin/sluice" serve "$@"
