#!/usr/bin/env bash
# First contact: install what is missing, fetch a small real model, build, show the plan, and let a pipeline of two CPU
# worker processes answer a question.
#   scripts/demo.sh ["your question"]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=lib.sh
. "$root/scripts/lib.sh"

question=${1:-"What is the capital of France? Answer in one sentence."}
need_packages cc:gcc
need_rust
model=$(fetch_smollm2)
say "building (a few minutes the first time)"
(cd "$root" && cargo build --release --locked --bin spillway)
spillway="${CARGO_TARGET_DIR:-$root/target}/release/spillway"

say "the plan: which process runs which layers"
"$spillway" plan -m "$model" --cpu-workers 2
say "$question"
"$spillway" run -m "$model" --cpu-workers 2 --temp 0 -n 64 -p "$question"
