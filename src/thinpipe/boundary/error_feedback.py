"""Error feedback (EF) and EF21: direction codecs that compensate compression errors in later messages.

EF (Seide et al. 2014): send C(x + e), then e = x + e - C(x + e). The sum of all messages plus e is the sum of all x.
EF21 (arXiv 2106.05203): both ends keep a copy A; send C(x - A), then A = A + C(x - A) at both ends; A is decoded.
As in arXiv 2401.07788, a boundary has one buffer per direction, indexed by the position in the micro-batch: consecutive
samples at the same position share it. A non-finite message is sent, so that the step is skipped, but leaves the codec
state unchanged.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.boundary.contract import Compressor, DirectionCodec, MessageContext, MessageShape
from thinpipe.core.errors import UserError


class ErrorFeedback(DirectionCodec):
    """EF. Codec state at the encoding end only. Validation messages neither use nor change it."""

    def __init__(self, compressor: Compressor, shape: MessageShape, store: Path | None = None) -> None:
        super().__init__(compressor, shape, store)
        self.error_BTW = self._snapshot_BTW = zero_codec_state(shape)

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        if not context.training:
            return self.compressor.encode(values_BTW, context)
        corrected_BTW = values_BTW + self.error_BTW.to(values_BTW.device)
        data = self.compressor.encode(corrected_BTW, context)
        self.error_BTW = finite_or(corrected_BTW - self.compressor.decode(data, context), self.error_BTW)
        return data

    def snapshot(self) -> None:
        self._snapshot_BTW = self.error_BTW  # no copy: error_BTW is replaced, never written in place

    def rollback(self) -> None:
        self.error_BTW = self._snapshot_BTW

    def encoder_state(self) -> dict[str, Tensor]:
        return {"error_BTW": self.error_BTW}

    def load_encoder_state(self, state: Mapping[str, Tensor]) -> None:
        self.error_BTW = restored_codec_state(state, "error_BTW", self.error_BTW)


class Ef21(DirectionCodec):
    """EF21. Codec state at both ends, equal because both see the same messages. Validation uses but does not change
    it."""

    def __init__(self, compressor: Compressor, shape: MessageShape, store: Path | None = None) -> None:
        super().__init__(compressor, shape, store)
        self.sent_BTW, self.received_BTW = zero_codec_state(shape), zero_codec_state(shape)
        self.snapshot()

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        self.sent_BTW = self.sent_BTW.to(values_BTW.device)
        data = self.compressor.encode(values_BTW - self.sent_BTW, context)
        if context.training:
            self.sent_BTW = finite_or(self.sent_BTW + self.compressor.decode(data, context), self.sent_BTW)
        return data

    def decode(self, data: Tensor, context: MessageContext) -> Tensor:
        self.received_BTW = self.received_BTW.to(data.device)
        values_BTW = self.received_BTW + self.compressor.decode(data, context)
        if context.training:
            self.received_BTW = finite_or(values_BTW, self.received_BTW)
        return values_BTW

    def snapshot(self) -> None:
        self._snapshot = self.sent_BTW, self.received_BTW

    def rollback(self) -> None:
        self.sent_BTW, self.received_BTW = self._snapshot

    def encoder_state(self) -> dict[str, Tensor]:
        return {"copy_BTW": self.sent_BTW}

    def decoder_state(self) -> dict[str, Tensor]:
        return {"copy_BTW": self.received_BTW}

    def load_encoder_state(self, state: Mapping[str, Tensor]) -> None:
        self.sent_BTW = restored_codec_state(state, "copy_BTW", self.sent_BTW)

    def load_decoder_state(self, state: Mapping[str, Tensor]) -> None:
        self.received_BTW = restored_codec_state(state, "copy_BTW", self.received_BTW)


def zero_codec_state(shape: MessageShape) -> Tensor:
    return torch.zeros(shape.batch, shape.tokens, shape.width, dtype=torch.float32)


def finite_or(new: Tensor, old: Tensor) -> Tensor:
    """`new` if all its entries are finite, else `old`."""
    return new if new.isfinite().all() else old


def restored_codec_state(state: Mapping[str, Tensor], name: str, here: Tensor) -> Tensor:
    """The saved tensor `name`. Raises UserError if it is missing or not of the shape of `here`."""
    saved = state.get(name)
    if saved is None or saved.shape != here.shape:
        was = "nothing" if saved is None else f"codec state of {tuple(saved.shape)}"
        raise UserError(
            f"there is {was} where the boundary codec needs {tuple(here.shape)} numbers: go on with the [boundary], "
            "micro-batches and sequences that the checkpoint was saved with, or begin a new run with model.initial"
        )
    return saved
