#!/bin/sh
# Installs the Debian 12 packages that Sluice needs and that are missing. Says what it does; does nothing when all are there.
#
#   scripts/setup.sh            everything (build, serve, test)
#   scripts/setup.sh build      only what building and serving need
set -eu

BUILD_PACKAGES="g++ cmake ninja-build make git ca-certificates python3
  libabsl-dev libboost1.81-dev libssl-dev libhwy-dev libhiredis-dev libucx-dev prometheus-cpp-dev libsimdjson-dev
  nlohmann-json3-dev libpcre2-dev libutf8proc-dev libdnnl-dev liburing-dev libspdlog-dev libfmt-dev
  libcli11-dev libtomlplusplus-dev libxxhash-dev zlib1g-dev libgtest-dev libgmock-dev librapidcheck-dev ccache mold"
TEST_PACKAGES="python3-venv python3-jinja2 curl redis-server clang-format chromium"

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 3; }

case "${1:-all}" in
  build) wanted="$BUILD_PACKAGES" ;;
  all) wanted="$BUILD_PACKAGES $TEST_PACKAGES" ;;
  -h|--help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "setup: unknown argument '$1'; use 'build', 'all' or nothing" >&2; exit 2 ;;
esac

command -v dpkg-query >/dev/null 2>&1 || fail "this is not a Debian system; install the equivalents of: $(echo $wanted)"

missing=""
for package in $wanted; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing="$missing $package"
done
if [ -z "$missing" ]; then
  say "all $(echo $wanted | wc -w) packages are installed"
  exit 0
fi

if [ "$(id -u)" = 0 ]; then
  as_root=""
elif command -v sudo >/dev/null 2>&1; then
  as_root="sudo"
else
  fail "root or sudo is needed to install:$missing"
fi

release=$(. /etc/os-release 2>/dev/null && echo "${ID:-unknown} ${VERSION_ID:-unknown}")
[ "$release" = "debian 12" ] || say "note: tested on Debian 12, this is $release"

say "installing:$missing"
$as_root apt-get update -q
# --no-remove: libboost1.81-dev conflicts with libboost1.74-dev; taking packages away is the user's decision, not ours.
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends --no-remove $missing ||
  fail "apt-get could not install the packages above without removing others (libboost1.81-dev conflicts with
setup: libboost1.74-dev). Remove the conflicting package yourself, or run: apt-get install$missing"
say "done"
