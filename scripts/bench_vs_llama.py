"""Spillway and llama.cpp in turns on one file: medians of prefill and decode speed, and their ratio round by round.

Started by bench-vs-llama.sh. Each measurement is a process of its own, so neither side profits from the other's memory; a round
is one Spillway run followed by one llama.cpp run, so that drift of the machine hits both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys


def llama_child(model: str, threads: int, prompt: int, generate: int) -> dict:
    """Times one prefill of `prompt` tokens and `generate` single-token steps with llama.cpp's C interface."""
    import ctypes
    import time

    import llama_cpp as ll

    ll.llama_backend_init()
    silent = ll.llama_log_callback(lambda *_: None)
    ll.llama_log_set(silent, ctypes.c_void_p(0))
    mp = ll.llama_model_default_params()
    mp.n_gpu_layers = 0
    m = ll.llama_model_load_from_file(model.encode(), mp)
    cp = ll.llama_context_default_params()
    cp.n_ctx, cp.n_batch, cp.n_ubatch = prompt + generate + 64, 2048, 512
    cp.n_threads = cp.n_threads_batch = threads
    ctx = ll.llama_init_from_model(m, cp)
    vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(m))

    def decode(ids):
        arr = (ll.llama_token * len(ids))(*ids)
        if ll.llama_decode(ctx, ll.llama_batch_get_one(arr, len(ids))):
            sys.exit("llama_decode failed")
        ll.llama_synchronize(ctx)

    def ids(n):
        return [10 + (i * 7919) % (vocab - 20) for i in range(n)]

    decode(ids(min(64, prompt)))
    ll.llama_memory_clear(ll.llama_get_memory(ctx), True)
    t0 = time.perf_counter()
    decode(ids(prompt))
    t1 = time.perf_counter()
    for i in range(generate):
        decode([10 + (i * 104729) % (vocab - 20)])
    t2 = time.perf_counter()
    return {"prefill": prompt / (t1 - t0), "decode": generate / (t2 - t1)}


def spillway_run(args) -> dict:
    cmd = [args.spillway, "bench", "-m", args.model, "-p", str(args.p), "-n", str(args.n), "-d", "0", "-r", "1",
           "--threads", str(args.t), "--json", *args.rest]
    out = json.loads(subprocess.run(cmd, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])
    rate = {row["test"]: row["tok_s"]["median"] for row in out["results"]}
    return {"prefill": rate["prefill"], "decode": rate["decode"]}


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    ap.add_argument("--spillway", required=True)
    ap.add_argument("-t", type=int, default=os.cpu_count())
    ap.add_argument("-p", type=int, default=512)
    ap.add_argument("-n", type=int, default=64)
    ap.add_argument("-r", type=int, default=5)
    ap.add_argument("--llama-child", action="store_true", help=argparse.SUPPRESS)
    args, rest = ap.parse_known_args()
    args.rest = [a for a in rest if a != "--"]
    if args.llama_child:
        print(json.dumps(llama_child(args.model, args.t, args.p, args.n)))
        return
    child = [sys.executable, __file__, args.model, "--spillway", args.spillway, "-t", str(args.t), "-p", str(args.p),
             "-n", str(args.n), "--llama-child"]
    rounds = []
    for i in range(args.r):
        ours = spillway_run(args)
        theirs = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])
        rounds.append((ours, theirs))
        print(f"round {i + 1}: prefill {ours['prefill']:.1f} / {theirs['prefill']:.1f}   "
              f"decode {ours['decode']:.1f} / {theirs['decode']:.1f} tok/s (Spillway / llama.cpp)", file=sys.stderr)
    result = {"model": os.path.basename(args.model), "threads": args.t, "rounds": args.r, "options": args.rest}
    for kind, size in (("prefill", args.p), ("decode", args.n)):
        result[kind] = {
            "tokens": size,
            "spillway_tok_s": round(statistics.median(o[kind] for o, _ in rounds), 2),
            "llama_tok_s": round(statistics.median(t[kind] for _, t in rounds), 2),
            "ratio": round(statistics.median(o[kind] / t[kind] for o, t in rounds), 3),
            "ratio_min": round(min(o[kind] / t[kind] for o, t in rounds), 3),
            "ratio_max": round(max(o[kind] / t[kind] for o, t in rounds), 3),
        }
    print(json.dumps(result))


main()
