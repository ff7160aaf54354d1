"""Attention on this CPU in float32 and in bfloat16, forward and backward: python -m benchmarks.attention.

Why `models/kv_cache.py` computes the attention of short texts in float32 on CPUs.
"""

from argparse import ArgumentParser
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F

from benchmarks.provenance import versions

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2048, 8, 4, 32
LENGTHS, REPEATS = (16, 64, 128, 256, 512, 1024), 9


def milliseconds(length: int, dtype: torch.dtype) -> float:
    """Of 2,048 tokens in texts of this length."""
    query, key, value = (
        torch.randn(TOKENS // length, heads, length, HEAD_DIM, dtype=dtype, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    taken = []
    for _ in range(REPEATS):
        began = perf_counter()
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
        taken.append(1e3 * (perf_counter() - began))
    return median(taken)


def table() -> str:
    rows = [
        f"{TOKENS:,} tokens, {HEADS} heads ({KV_HEADS} for keys) of {HEAD_DIM}, one thread, median of {REPEATS}; "
        f"{', '.join(f'{name} {value}' for name, value in versions().items())}",
        "",
        "| tokens of a text | float32, ms | bfloat16, ms | bfloat16 / float32 |",
        "|---:|---:|---:|---:|",
    ]
    for length in LENGTHS:
        full, half = (milliseconds(length, dtype) for dtype in (torch.float32, torch.bfloat16))
        rows.append(f"| {length} | {full:.1f} | {half:.1f} | {half / full:.1f} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the table there too")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    text = table()
    print(text)
    if output is not None:
        output.write_text(f"# Attention on a CPU\n\n{text}")


if __name__ == "__main__":
    main()
