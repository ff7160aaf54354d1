"""A boundary method of your own in one file: signs, one bit a number, and one scale a token.

    python examples/custom_boundary.py [STEPS]

Trains a small dense Llama of two segments twice, with bf16 and with signs between them, in one process: what crosses is
encoded and decoded as it would be between two. See docs/howto/add-a-boundary-method.md.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import thinpipe
from thinpipe import BoundaryConfig, CompressionConfig, Compressor, MessageContext, MessageShape, RunConfig

TOKENS = 256  # of a sequence


class Signs(Compressor):
    """Every number becomes plus or minus the mean magnitude of its token."""

    def __init__(self, shape: MessageShape, settings: CompressionConfig, seed: int) -> None:
        self.shape = shape

    @property
    def nbytes(self) -> int:  # stated beforehand: buffers and meters read it
        return self.shape.rows * (torch.bfloat16.itemsize + self.shape.width // 8)

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        rows = values_BTW.reshape(self.shape.rows, self.shape.width)
        scales = rows.abs().mean(1, keepdim=True).to(torch.bfloat16).view(torch.uint8)
        return torch.cat((scales, thinpipe.pack_bits(rows > 0, bits=1)), dim=1).flatten()

    def decode(self, data: Tensor, context: MessageContext) -> Tensor:
        rows = data.view(self.shape.rows, -1)
        scales = rows[:, :2].contiguous().view(torch.bfloat16).float()
        signs = 2.0 * thinpipe.unpack_bits(rows[:, 2:], self.shape.width, bits=1) - 1.0
        return (signs * scales).view(self.shape.batch, self.shape.tokens, self.shape.width)


def train(name: str, boundary: BoundaryConfig, folder: Path, steps: int) -> None:
    run = thinpipe.train(
        RunConfig(),
        quiet=True,
        job={"dump_folder": folder / name},
        data={"path": folder / "tokens"},
        model={"preset": "llama-tiny", "boundaries": [2]},
        training={"steps": steps, "global_batch_size": 4},
        lr_scheduler={"warmup_steps": steps // 5},
        validation={"steps": 5},
        boundary=boundary,
    )
    codec = thinpipe.codec(name, (4, TOKENS, 128))
    nbytes = codec.nbytes / (4 * TOKENS)
    print(f"{name}: {nbytes:.0f} bytes a token and direction, validation loss {run.validation_losses().losses[-1]:.3f}")


if __name__ == "__main__":
    thinpipe.register_compressor("signs", Signs)
    with tempfile.TemporaryDirectory() as name:
        folder, steps = Path(name), int(sys.argv[1]) if len(sys.argv) > 1 else 100
        validation = ["sample:validation"]
        thinpipe.tokenize("sample:train", folder / "tokens", validation_sources=validation, vocab_size=2048)
        signs = CompressionConfig(kind="signs")
        train("bf16", BoundaryConfig(forward="bf16", backward="bf16"), folder, steps)
        train("signs", BoundaryConfig(states=signs, gradients=signs), folder, steps)
