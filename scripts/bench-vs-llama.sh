#!/usr/bin/env bash
# Compares Spillway with llama.cpp on the same file, in turns on one machine, and prints medians and ratios.
#   scripts/bench-vs-llama.sh MODEL.gguf [-t THREADS] [-p PROMPT] [-n GENERATE] [-r ROUNDS] [-- SPILLWAY BENCH OPTIONS]
# llama.cpp is built from its Python package's source for this CPU (several minutes, once), into a virtual environment in the cache
# folder; LLAMA_PYTHON=/path/to/python uses another one that has llama-cpp-python.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=lib.sh
. "$root/scripts/lib.sh"
[ $# -ge 1 ] || die "usage: $0 MODEL.gguf [-t THREADS] [-p PROMPT] [-n GENERATE] [-r ROUNDS] [-- SPILLWAY BENCH OPTIONS]"
need_rust
python=${LLAMA_PYTHON:-}
if [ -z "$python" ]; then
  venv="${XDG_CACHE_HOME:-$HOME/.cache}/spillway/llama-venv"
  python="$venv/bin/python"
  if ! "$python" -c 'import llama_cpp' 2>/dev/null; then
    need_packages python3:python3 g++:g++ make:make
    say "building llama.cpp from its Python package (several minutes, once)"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet cmake ninja
    PATH="$venv/bin:$PATH" CMAKE_ARGS="-DGGML_NATIVE=ON" "$venv/bin/pip" install --quiet --no-cache-dir \
      --no-binary llama-cpp-python llama-cpp-python==0.3.36
  fi
fi
(cd "$root" && cargo build --release --locked --bin spillway) >&2
exec "$python" "$root/scripts/bench_vs_llama.py" --spillway "${CARGO_TARGET_DIR:-$root/target}/release/spillway" "$@"
