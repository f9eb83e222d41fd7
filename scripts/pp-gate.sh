#!/usr/bin/env bash
# The gate for pipelines over several GPUs: one GPU and N of them must give the same bytes, and what cannot be placed must be
# refused without disturbing the model that serves.
#   scripts/pp-gate.sh [--pp N] [--devices LIST] [--model FILE] [--emulated] [--skip-end-to-end] [--dry-run]
#     --pp N             stages of the pipeline that is compared with one stage (2)
#     --devices LIST     GPUs to use, as for `spillway run --devices` (default: the first N alike ones)
#     --model FILE       model to compare with (default: a tiny one that is made here, which needs cargo)
#     --emulated         emulated devices instead of GPUs: what CI runs; the kernels need a C++ compiler
#     --skip-end-to-end  compare logits and token ids only, leave out the daemon
#     --dry-run          say what would be done
# The program is $SPILLWAY_BIN, else it is built here. Exit code: 0 passed, or skipped with a reason; 1 failed; 2 wrong usage,
# or the environment lacks something.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=lib.sh
. "$root/scripts/lib.sh"

stages=2 devices="" model="" emulated="" end_to_end=yes dry_run=""
while [ $# -gt 0 ]; do
  case $1 in
    --pp | --devices | --model) [ $# -ge 2 ] || die "$1 needs a value" ;;&
    --pp) stages=$2; shift ;;
    --devices) devices=$2; shift ;;
    --model) model=$2; shift ;;
    --emulated) emulated=yes ;;
    --skip-end-to-end) end_to_end="" ;;
    --dry-run) dry_run=yes ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) die "unknown option $1; see --help" ;;
  esac
  shift
done
case $stages in '' | *[!0-9]* | 0 | 1) die "--pp must be a number from 2 on" ;; esac

skip() { say "skipped: $*"; exit 0; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }

# Not the settings of whoever runs this.
export SPILLWAY_CONFIG=/dev/null

# --- the program -----------------------------------------------------------------------------------------------------
spillway=${SPILLWAY_BIN:-}
if [ -z "$spillway" ]; then
  need_rust
  say "building"
  (cd "$root" && cargo build --release --locked --bin spillway) >&2 || die "the build failed"
  spillway="${CARGO_TARGET_DIR:-$root/target}/release/spillway"
fi
"$spillway" --version >/dev/null 2>&1 || die "$spillway does not run; set SPILLWAY_BIN to the program"

# --- the devices -----------------------------------------------------------------------------------------------------
# alike COUNT: numbers of the first COUNT usable GPUs of one architecture, separated by commas; nothing if there are fewer.
# Integrated GPUs share the host's memory and are left out.
alike() {
  "$spillway" devices --json | tr -d '\n' | sed 's/{"index":/\n&/g' | grep '"refused":null' | grep '"integrated":false' |
    sed -n 's/^{"index":\([0-9]*\),.*"arch":"\([^"]*\)".*/\2 \1/p' |
    awk -v want="$1" '{ list[$1] = list[$1] (count[$1]++ ? "," : "") $2; if (count[$1] == want) { print list[$1]; exit } }'
}
if [ -n "$emulated" ]; then
  [ -z "$devices" ] || die "--emulated and --devices exclude one another"
  devices="emulated:devices=$stages"
  "$spillway" kernels build --arch emulated_wave32 >/dev/null || die "kernels for emulated devices cannot be compiled"
elif [ -z "$devices" ]; then
  devices=$(alike "$stages") || true
  [ -n "$devices" ] || skip "fewer than $stages usable GPUs of one kind; \`$spillway devices\` lists what there is"
else
  named=$(printf '%s' "$devices" | tr ',' '\n' | grep -c .) || true
  [ "$named" -ge "$stages" ] || skip "--devices names $named GPUs, fewer than the $stages stages of --pp"
fi

# --- the model -------------------------------------------------------------------------------------------------------
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "$model" ]; then
  command -v cargo >/dev/null 2>&1 || die "without cargo no model can be made here: give one with --model"
  model="$work/tiny.gguf"
  (cd "$root" && cargo run --quiet --locked -p spillway-model --features testing --example tiny_model -- \
    qwen35 "$model" $((3 * stages))) ||
    die "the tiny model cannot be made"
fi
[ -r "$model" ] || die "the model $model cannot be read"

say "devices $devices, pp 1 and $stages, model $model, $("$spillway" --version)"
if [ -n "$dry_run" ]; then
  say "would compare logits, at once and token by token, and greedy token ids"
  [ -z "$end_to_end" ] || say "would compare answers of the daemon, and check that refused loads leave the model serving"
  exit 0
fi

# --- token by token --------------------------------------------------------------------------------------------------
ids=$(seq -s, 5 7 215)
positions=31
# logits NAME OPTIONS…: the largest logits of every position, with mean and deviation of all of them, exactly as printed.
logits() {
  name=$1
  shift
  "$spillway" logits -m "$model" --ids "$ids" --top 4096 --json --quiet --devices "$devices" "$@" >"$work/$name" ||
    { tail -n 1 "$work/$name" >&2; fail "logits ($name)"; }
  [ "$(grep -c '"argmax"' "$work/$name")" = "$positions" ] || fail "logits ($name): not $positions positions"
}
same() {
  cmp -s "$work/$1" "$work/$2" && return 0
  line=$(cmp "$work/$1" "$work/$2" 2>&1 | sed 's/.*line //') || true
  fail "$3: $1 and $2 differ from line $line on"
}
say "logits at once and token by token"
logits one --pp 1
logits one-by-token --pp 1 --chunk 1
logits many --pp "$stages"
logits many-by-token --pp "$stages" --chunk 1
same one one-by-token "pp 1, whole prompt and single tokens"
same one many "pp 1 and pp $stages"
same one many-by-token "pp 1 and pp $stages, single tokens"

say "greedy token ids"
# ids NAME OPTIONS…: the ids of a greedy answer.
answer_ids() {
  name=$1
  shift
  "$spillway" run -m "$model" --raw -p "the word" -n 40 --temp 0 --ignore-eos --json --quiet --devices "$devices" "$@" |
    sed -n 's/.*"token_ids":\[\([0-9,]*\)\].*/\1/p' >"$work/$name" || fail "the answer ($name)"
  [ "$(tr ',' '\n' <"$work/$name" | grep -c .)" = 40 ] || fail "the answer ($name) has not 40 tokens"
}
answer_ids one-ids --pp 1
answer_ids many-ids --pp "$stages"
same one-ids many-ids "greedy answers of pp 1 and pp $stages"

[ -n "$end_to_end" ] || { say "passed (without the daemon)"; exit 0; }

# --- the daemon, end to end ------------------------------------------------------------------------------------------
tokens=40
json_string() { printf '"%s"' "$(printf '%s' "$1" | sed 's/\\/\\\\/g; s/"/\\"/g')"; }
load() { printf '{"type":"load","id":"%s","model":%s,"params":{%s}}\n' "$1" "$(json_string "$model")" "$2"; }
generate() {
  printf '{"type":"generate","id":"%s","prompt_ids":[%s],"temperature":0,"max_tokens":%s,"ignore_eos":true}\n' "$1" "$ids" "$tokens"
}
# daemon NAME: a conversation from standard input; its events.
daemon() { "$spillway" daemon >"$work/$1" || fail "the daemon ($1)"; }
# text NAME ID: pieces of an answer. Nothing generated is a failure of its own: no two silences agree.
text() {
  grep '"type":"done"' "$work/$1" | grep "\"id\":\"$2\"" | grep -q "\"tokens\":$tokens," ||
    { cat "$work/$1" >&2; fail "the daemon ($1) did not answer \"$2\" with $tokens tokens"; }
  grep '"type":"token"' "$work/$1" | grep "\"id\":\"$2\"" | sed "s/\"id\":\"$2\"//" >"$work/$1.$2" ||
    fail "the daemon ($1) answered \"$2\" with no text"
}
common="\"devices\":$(json_string "$devices"),\"max_seq\":256"
say "answers of the daemon"
for pp in 1 "$stages"; do
  { load l "$common,\"pp\":$pp"; generate answer; } | daemon "pp$pp"
  text "pp$pp" answer
done
cmp -s "$work/pp1.answer" "$work/pp$stages.answer" || fail "answers of pp 1 and pp $stages differ"

say "refused loads leave the model serving"
pp="$common,\"pp\":$stages"
refusals=(
  "pp_beyond_devices|$common,\"pp\":256"
  "pp_layers_parse|$pp,\"pp_layers\":\"1,x\""
  "pp_layers_count|$pp,\"pp_layers\":\"1\""
  "pp_layers_sum|$pp,\"pp_layers\":\"$(printf '1%.0s,' $(seq "$stages") | sed 's/,$//')\""
  "placement_out_of_range|$pp,\"max_seq\":0"
  "tp_unsupported|$pp,\"tp\":2"
  "draft_unsupported|$pp,\"draft\":\"draft.gguf\""
  "cask_unsupported|$pp,\"cask_sidecar\":\"cask.bin\""
)
{
  load l "$pp"
  for row in "${refusals[@]}"; do load "${row%%|*}" "${row#*|}"; done
  generate after
} | daemon refusals
for row in "${refusals[@]}"; do
  code=${row%%|*}
  grep '"type":"error"' "$work/refusals" | grep "\"id\":\"$code\"" | grep -q "\"code\":\"$code\"" ||
    { cat "$work/refusals" >&2; fail "a load that should be refused with $code"; }
done
text refusals after
cmp -s "$work/pp1.answer" "$work/refusals.after" || fail "the answer after refused loads differs"
say "passed"
