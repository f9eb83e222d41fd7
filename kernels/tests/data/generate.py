#!/usr/bin/env python3
"""Writes the golden vectors of the weight formats with the `gguf` package (pip install gguf), the reference.

For every format: FORMAT.bin = file bytes of two random blocks (64 elements for floating-point formats), then the f32
values they decode to. formats.csv = name, type number, block length, block bytes. Run it in this folder; the output
is reproducible (seeded by the type number) and checked in.
"""

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize

FORMATS = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()
# Where a block's f16 factors stand: random bytes there could be infinities.
FACTORS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip


def blocks(name: str, kind: Type) -> np.ndarray:
    random = np.random.default_rng(int(kind))
    length, size = GGML_QUANT_SIZES[kind]
    if length == 1:
        values = random.standard_normal(64).astype(np.float32)
        if name == "F32":
            return values.view(np.uint8)
        return (values.astype(np.float16) if name == "F16" else (values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    out = random.integers(0, 256, (2, size), dtype=np.uint8)
    for at in FACTORS[name]:
        out[:, at : at + 2] = random.standard_normal((2, 1)).astype(np.float16).view(np.uint8)
    return out.reshape(-1)


with open("formats.csv", "w") as table:
    for name in FORMATS:
        kind = Type[name]
        length, size = GGML_QUANT_SIZES[kind]
        table.write(f"{name},{int(kind)},{length},{size}\n")
        raw = blocks(name, kind)
        exact = dequantize(raw.reshape(1, -1), kind).astype(np.float32).reshape(-1)
        with open(f"{name}.bin", "wb") as file:
            file.write(raw.tobytes() + exact.tobytes())
