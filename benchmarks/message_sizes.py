"""Bytes per token that cross a boundary of a model as wide as the paper's: python -m benchmarks.message_sizes.

Ids, scales and padding are counted, as the methods state them and the contract test holds the transport to.
"""

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import torch

from thinpipe.boundary.contract import MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.boundary.sizes import MessageSize, backward_nbytes, forward_nbytes
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig, FormatName
from thinpipe.transport.emulation.framing import wire_nbytes

DIM, WIDTH, TOKENS, VOCABULARY = 4096, 40, 1024, 128_256
"""Width of the model and of the subspace as in arXiv 2506.01260; ids of Llama 3, three bytes each."""


BF16 = BoundaryConfig(forward="bf16", backward="bf16")
INT4 = BoundaryConfig(forward="int4", backward="int4")
ROTATED = CompressionConfig(kind="quantise", bits=4, per="token", rotate=True)
ROTATED_INT4 = BoundaryConfig(states=ROTATED, gradients=ROTATED)


def nbytes_per_token(boundary: BoundaryConfig, size: MessageSize) -> float:
    """Bytes per token across a boundary in both directions, token ids and scales included."""
    return (forward_nbytes(boundary, size) + backward_nbytes(boundary, size)) / size.rows


def int4_channels(size: MessageSize, ratio: int) -> int:
    """Largest number of int4 channels whose messages have at least `ratio` times fewer bytes than bf16
    messages of `size`."""
    limit = nbytes_per_token(BF16, size) / ratio
    widths = range(1, size.width + 1)
    return max(width for width in widths if nbytes_per_token(INT4, replace(size, width=width)) <= limit)


def sizes(width: int, number_format: FormatName, *, in_subspace: bool) -> tuple[float, float, float]:
    """Bytes per token forward and backward, and both with the framing of TCP, IP and Ethernet."""
    shape = MessageShape(batch=1, tokens=TOKENS, width=width, vocab_size=VOCABULARY, dtype=torch.bfloat16)
    settings = BoundaryConfig(forward=number_format, backward=number_format)
    method = make_method(settings, shape, in_subspace=in_subspace, seed=0)
    lengths = method.forward_nbytes, method.backward_nbytes
    return lengths[0] / TOKENS, lengths[1] / TOKENS, sum(map(wire_nbytes, lengths)) / TOKENS


def table() -> str:
    rows = [
        f"d = {DIM}, k = {WIDTH}, messages of {TOKENS} tokens, vocabulary {VOCABULARY:,}",
        "",
        "| message | forward B/token | backward B/token | both | fewer than dense bf16 | with framing | fewer |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    dense = sizes(DIM, "bf16", in_subspace=False)
    formats: list[FormatName] = ["fp32", "bf16", "int8", "int4"]
    variants = [("dense bf16", dense)]
    variants += [(f"subspace {name}", sizes(WIDTH, name, in_subspace=True)) for name in formats]
    for name, (forward, backward, framed) in variants:
        both = forward + backward
        rows.append(
            f"| {name} | {forward:.1f} | {backward:.1f} | {both:.1f} | {(dense[0] + dense[1]) / both:.1f}x | "
            f"{framed:.1f} | {dense[2] / framed:.1f}x |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the table there too")
    output = parser.parse_args().output
    print(table())
    if output is not None:
        output.write_text(f"# Bytes per token at one boundary\n\n{table()}")


if __name__ == "__main__":
    main()
