"""Uniform quantisation: integers of a few bits between the least and the largest number of a sample, token or tile.

arXiv 2401.07788 spans 2^bits - 1 steps over all of it; tiles of tens of numbers and the rotation are those of TAH-Quant
(arXiv 2506.01352). The least number and the step are bfloat16, rounded outwards, so that every number lies within.
"""

import torch
from torch import Tensor

from thinpipe.boundary.bits import pack_bits, unpack_bits
from thinpipe.boundary.contract import Compressor, MessageShape, Passage
from thinpipe.boundary.formats import round_up_to_bf16
from thinpipe.boundary.lengths import QuantiseLayout
from thinpipe.boundary.rotation import Rotation
from thinpipe.boundary.settings import Compression


class Quantise(Compressor):
    def __init__(self, shape: MessageShape, settings: Compression, seed: int) -> None:
        assert settings.bits is not None
        self.shape, self.bits, self.steps = shape, settings.bits, 2**settings.bits - 1
        layout = QuantiseLayout(shape, settings)
        self.tile, self.tiles = layout.tile, layout.tiles
        self.numbers_nbytes, self.nbytes = layout.numbers_nbytes, layout.nbytes
        self.rotation = Rotation(shape.width, seed) if settings.rotate else None

    def encode(self, values_BTW: Tensor, passage: Passage) -> Tensor:
        rows = values_BTW.reshape(self.shape.rows, self.shape.width)
        if self.rotation is not None:
            rows = self.rotation.apply(rows)
        tiles = self._tiles(rows.reshape(self.shape.batch, -1))
        least = -round_up_to_bf16(-tiles.amin(2, keepdim=True))
        step = round_up_to_bf16((tiles.amax(2, keepdim=True) - least.float()) / self.steps)
        steps = (tiles - least.float()) / torch.where(step == 0, 1.0, step.float())
        whole = steps.round() if passage.uniform is None else (steps + passage.uniform(steps.shape).to(steps)).floor()
        integers = whole.clamp(0, self.steps).to(torch.int64).flatten(1)[:, : self.shape.tokens * self.shape.width]
        ranges = torch.cat((least, step), dim=2).flatten().view(torch.uint8)
        return torch.cat((ranges, pack_bits(integers.reshape(1, -1), self.bits).flatten()))

    def decode(self, data: Tensor, passage: Passage) -> Tensor:  # noqa: ARG002
        numbers = data[-self.numbers_nbytes :].view(1, -1)
        integers = unpack_bits(numbers, self.shape.rows * self.shape.width, self.bits)
        tiles = self._tiles(integers.view(self.shape.batch, -1).float())
        ranges = data[: -self.numbers_nbytes].view(torch.bfloat16).float().view(self.shape.batch, self.tiles, 2)
        values = ranges[:, :, :1] + tiles * ranges[:, :, 1:]
        rows = values.flatten(1)[:, : self.shape.tokens * self.shape.width].reshape(self.shape.rows, self.shape.width)
        if self.rotation is not None:
            rows = self.rotation.undo(rows)
        return rows.view(self.shape.batch, self.shape.tokens, self.shape.width)

    def _tiles(self, samples: Tensor) -> Tensor:
        """[B, tiles, tile]; a tile that is too short is filled with its last number, which leaves its range alone."""
        missing = self.tiles * self.tile - samples.shape[1]
        filled = torch.cat((samples, samples[:, -1:].expand(-1, missing)), dim=1)
        return filled.view(len(samples), self.tiles, self.tile)
