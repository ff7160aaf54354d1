"""A boundary method of your own in one file: signs, one bit a number, and one scale a token.

    python examples/custom_boundary.py [STEPS]

Trains a small dense Llama of two segments twice, with bf16 and with signs between them, in one process: what crosses is
encoded and decoded as it would be between two. See docs/howto/add-a-boundary-method.md.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.boundary.contract import Compressor, MessageContext, MessageShape
from thinpipe.boundary.packing import pack_bits, packed_nbytes, unpack_bits
from thinpipe.boundary.registry import COMPRESSORS
from thinpipe.config.boundary import COMPRESSION_SETTINGS, BoundaryConfig, CompressionConfig
from thinpipe.config.toml import from_table
from thinpipe.core.events import Validated, read_events
from thinpipe.data import TokenizeConfig, no_progress, prepare
from thinpipe.pipeline.boundary_methods import boundary_method
from thinpipe.training import RunConfig, Trainer


class Signs(Compressor):
    """Every number becomes plus or minus the mean magnitude of its token."""

    def __init__(self, shape: MessageShape, settings: CompressionConfig, seed: int) -> None:
        self.shape = shape

    @property
    def nbytes(self) -> int:  # stated beforehand: buffers, meters and plans read it
        return self.shape.rows * (torch.bfloat16.itemsize + packed_nbytes(self.shape.width, bits=1))

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        rows = values_BTW.reshape(self.shape.rows, self.shape.width)
        scales = rows.abs().mean(1, keepdim=True).to(torch.bfloat16).view(torch.uint8)
        return torch.cat((scales, pack_bits(rows > 0, bits=1)), dim=1).flatten()

    def decode(self, data: Tensor, context: MessageContext) -> Tensor:
        rows = data.view(self.shape.rows, -1)
        scales = rows[:, :2].contiguous().view(torch.bfloat16).float()
        signs = 2.0 * unpack_bits(rows[:, 2:], self.shape.width, bits=1) - 1.0
        return (signs * scales).view(self.shape.batch, self.shape.tokens, self.shape.width)


def train(name: str, boundary: BoundaryConfig, folder: Path, steps: int) -> None:
    settings = {
        "job": {"dump_folder": str(folder / name)},
        "data": {"path": str(folder / "tokens")},
        "model": {"preset": "llama-tiny", "boundaries": [2]},
        "training": {"steps": steps, "global_batch_size": 4},
        "lr_scheduler": {"warmup_steps": steps // 5},
        "validation": {"steps": 5},
    }
    config = replace(from_table(settings, RunConfig, where=__file__), boundary=boundary)
    trainer = Trainer(config)
    trainer.train()
    method, tokens = boundary_method(trainer.model_config, config), 4 * config.training.seq_len
    loss = [event.loss for event in read_events(folder / name / "events.jsonl") if isinstance(event, Validated)][-1]
    nbytes = (method.forward_nbytes + method.backward_nbytes) / tokens
    print(f"{name}: {nbytes:.0f} bytes a token, validation loss {loss:.3f}")


if __name__ == "__main__":
    COMPRESSION_SETTINGS["signs"] = ()  # the settings that mean something to it: none
    COMPRESSORS["signs"] = Signs
    with tempfile.TemporaryDirectory() as name:
        folder, steps = Path(name), int(sys.argv[1]) if len(sys.argv) > 1 else 100
        text = {"sources": ("sample:train",), "validation_sources": ("sample:validation",)}
        prepare(TokenizeConfig(**text, output=folder / "tokens", vocab_size=2048), no_progress)
        signs = CompressionConfig(kind="signs")
        train("bf16", BoundaryConfig(forward="bf16", backward="bf16"), folder, steps)
        train("signs", BoundaryConfig(states=signs, gradients=signs), folder, steps)
