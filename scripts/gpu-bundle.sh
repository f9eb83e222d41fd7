#!/usr/bin/env bash
# Packs the GPU tests for a machine that has a GPU but neither Rust nor a kernel compiler.
#   scripts/gpu-bundle.sh ARCH FOLDER     for example: scripts/gpu-bundle.sh sm_90 /tmp/bundle
# Then on that machine, in a copy of FOLDER: ./run.sh [arguments of the test executable]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=lib.sh
. "$root/scripts/lib.sh"
cd "$root"
[ $# = 2 ] || die "usage: scripts/gpu-bundle.sh ARCH FOLDER"
arch=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
need_rust

say "building the tests"
executable=$(cargo test --locked -p spillway-worker-gpu --test real_device --no-run --message-format=json |
  sed -n 's/.*"name":"real_device".*"executable":"\([^"]*\)".*/\1/p')
[ -x "$executable" ] || die "cargo named no test executable"
cp "$executable" "$folder/real_device"
say "compiling kernels for $arch"
rm -rf "$folder/kernels"
SPILLWAY_KERNEL_CACHE="$folder/kernels" SPILLWAY_TEST_ARCH="$arch" \
  "$folder/real_device" --ignored --exact fill_the_cache
cat >"$folder/run.sh" <<'RUN'
#!/bin/sh
# Runs the GPU tests of this folder; arguments go to the test executable.
here=$(cd "$(dirname "$0")" && pwd)
SPILLWAY_KERNEL_CACHE="${SPILLWAY_KERNEL_CACHE:-$here/kernels}" exec "$here/real_device" \
  --ignored --test-threads=1 --nocapture --skip fill_the_cache --skip ipc_child --skip nvrtc_child "$@"
RUN
chmod +x "$folder/run.sh"
say "$folder is ready: $(du -sh "$folder" | cut -f1)"
