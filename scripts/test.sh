#!/usr/bin/env bash
# Every test: formatting, lints, dependency rules, unit, property and whole-system tests, concurrency models.
#   scripts/test.sh [--quick]     --quick leaves out the concurrency models and the dependency rules
# Oracle models are looked for in $SPILLWAY_ORACLES, then in ../shared/oracles beside the checkout; without them their tests
# are skipped with a note, unless SPILLWAY_REQUIRE_ORACLES=1.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=lib.sh
. "$root/scripts/lib.sh"
cd "$root"
quick=${1:-}
program="${CARGO_TARGET_DIR:-$root/target}/debug/spillway"
need_packages cc:gcc
need_rust

say "format"
cargo fmt --all --check
say "lints"
cargo clippy --workspace --all-targets --locked -- -D warnings
if [ "$quick" != --quick ]; then
  if command -v cargo-deny >/dev/null 2>&1; then
    say "dependency rules"
    cargo deny --offline check bans licenses sources
  else
    say "cargo-deny is not installed: dependency rules not checked"
  fi
fi
say "the real model that some tests use"
if model=$(fetch_smollm2); then export SPILLWAY_SMOLLM2="$model"; else say "not available: its tests are skipped"; fi
say "tests"
cargo test --workspace --locked --no-fail-fast
say "pipelines over emulated devices"
if "$program" kernels build --arch emulated_wave32 >/dev/null; then
  SPILLWAY_BIN="$program" scripts/pp-gate.sh --emulated
elif [ "${SPILLWAY_REQUIRE_COMPILERS:-}" = 1 ]; then
  die "kernels for emulated devices cannot be compiled"
else
  say "no C++ compiler: skipped"
fi
if [ "$quick" != --quick ]; then
  say "concurrency models (loom)"
  RUSTFLAGS="--cfg loom" cargo test --locked --release -p spillway-protocol -p spillway-kernels --lib --target-dir target/loom loom
fi
say "all passed"
