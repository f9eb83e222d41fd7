#!/bin/sh
# Stands in for clang in tests/compile.rs: its object is a line of assembly text that names one entry point.
if [ "$1" = --version ]; then
  echo "clang version ${FAKE_CLANG_VERSION:-19.1.0}"
  exit
fi
while [ $# -gt 1 ]; do
  [ "$1" = -o ] && output=$2
  shift
done
printf '.visible .entry one(\n' > "$output"
