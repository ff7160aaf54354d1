"""Sends the outliers of a message whole, in bfloat16, and the rest with `quantise`: the first tokens of every sample,
and the few channels of largest magnitude.

Published models have channels that are tens of times larger than the others, and a first token that is hundreds of
times larger (arXiv 2402.17762). A quantisation range that has to cover them leaves few levels for all other values; a
rotation spreads them, but cannot remove them. The channels belong to a model, not to a token, so they are chosen once
a message, by the largest magnitude among the tokens that are left: a maximum is the same on every device, and a single
large value is enough to ruin a token. States of a bfloat16 model are restored in these places bit for bit.
"""

from dataclasses import replace

import torch
from torch import Tensor

from thinpipe.boundary.contract import Compressor, MessageContext, MessageShape
from thinpipe.boundary.packing import pack_bits, unpack_bits
from thinpipe.boundary.quantise import Quantise
from thinpipe.boundary.sizes import OutliersLayout
from thinpipe.config.boundary import CompressionConfig


class WholeOutliers(Compressor):
    """Whole tokens, whole channels, the quantised rest, and the positions of the channels, in this order."""

    def __init__(self, shape: MessageShape, settings: CompressionConfig, seed: int) -> None:
        self.shape, self.layout = shape, OutliersLayout(shape, settings)
        self.rest = Quantise(replace(shape, tokens=shape.tokens - self.layout.tokens), settings, seed)
        self.nbytes = self.layout.nbytes

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        tokens_BTW, rest_BTW = values_BTW[:, : self.layout.tokens], values_BTW[:, self.layout.tokens :]
        channels_C = largest_channels(rest_BTW, self.layout.channels)
        return torch.cat(
            (
                _to_bytes(tokens_BTW),
                _to_bytes(rest_BTW.index_select(2, channels_C)),
                self.rest.encode(rest_BTW.index_fill(2, channels_C, 0.0), context),
                pack_bits(channels_C[None], self.layout.position_bits).flatten(),
            )
        )

    def decode(self, data: Tensor, context: MessageContext) -> Tensor:
        batch, width, layout = self.shape.batch, self.shape.width, self.layout
        tokens, channels, rest, positions = data.split(
            [layout.tokens_nbytes, layout.channels_nbytes, self.rest.nbytes, layout.positions_nbytes]
        )
        tokens_BTW = _from_bytes(tokens).view(batch, layout.tokens, width)
        channels_BTC = _from_bytes(channels).view(batch, self.rest.shape.tokens, layout.channels)
        channels_C = unpack_bits(positions[None], layout.channels, layout.position_bits)[0]
        channels_BTC = torch.where(_are_positions(channels_C, width), channels_BTC, torch.nan)
        rest_BTW = self.rest.decode(rest, context).index_copy(2, channels_C.clamp(max=width - 1), channels_BTC)
        return torch.cat((tokens_BTW, rest_BTW), dim=1)


def make_quantise(shape: MessageShape, settings: CompressionConfig, seed: int) -> Compressor:
    """The compressor of kind "quantise": with `whole_channels` or `whole_tokens`, outliers are sent whole."""
    whole = settings.whole_channels or settings.whole_tokens
    return WholeOutliers(shape, settings, seed) if whole else Quantise(shape, settings, seed)


def largest_channels(values_BTW: Tensor, count: int) -> Tensor:
    """The `count` channels with the largest magnitudes, in ascending order, as int64.

    Of equal ones the first is taken, on every device; a channel that is not finite comes before all others.
    """
    largest_W = values_BTW.abs().amax((0, 1))
    return largest_W.sort(descending=True, stable=True).indices[:count].sort().values


def _are_positions(channels_C: Tensor, width: int) -> Tensor:
    """Whether these are positions that an encoder sends: ascending, none twice, none beyond the width.

    A sender of others is named by what it makes of them: values that are not finite (`pipeline/sanity.py`). Raising an
    error here would have every message wait for the device.
    """
    return (channels_C < width).all() & (channels_C.diff() > 0).all()


def _to_bytes(values: Tensor) -> Tensor:
    return values.flatten().to(torch.bfloat16).view(torch.uint8)


def _from_bytes(data: Tensor) -> Tensor:
    return data.view(torch.bfloat16).float()
