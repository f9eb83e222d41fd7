"""Golden recurrent states: runs the executable reference (shared/reference/qwen35_numpy.py) in float64 on an oracle file and
keeps, per recurrent layer, the rms of the state after the last token and every n-th value of it.

usage: recurrent_states.py REFERENCE.py ORACLES_DIR > recurrent_states.json     (needs numpy and gguf from PyPI)
Layouts: conv [channel][past], oldest first; matrix [head][value][key]."""
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

MODELS = ["qwen35", "qwen35_r1mtp"]
KEPT = 48


def summary(state):
    flat = state.reshape(-1)
    stride = flat.size // KEPT | 1
    return {
        "rms": round(float((flat**2).mean() ** 0.5), 7),
        "stride": stride,
        "values": [round(float(v), 7) for v in flat[::stride]],
    }


def states(reference, oracles, model):
    ids = json.loads((oracles / model / "compact.json").read_text())["seqs"]["37"]["ids"]
    sys.argv = [reference, str(oracles / model / f"{model}-bf16.gguf"), ",".join(map(str, ids)), "float64"]
    with contextlib.redirect_stdout(io.StringIO()):
        ran = runpy.run_path(reference)
    layers = {}
    for index, state in enumerate(ran["S"]):
        if ran["rec"][index]:
            layers[index] = {"conv": summary(state.conv.T), "matrix": summary(state.S)}
    return layers


reference, oracles = sys.argv[1], Path(sys.argv[2])
print(json.dumps({model: states(reference, oracles, model) for model in MODELS}, separators=(",", ":")))
