"""Error feedback and EF21: what compression left out of one message is made up for in later ones.

EF (Seide et al. 2014): send C(x + e), then e = x + e - C(x + e). What was sent and what is owed add up to the truth.
EF21 (arXiv 2106.05203): both ends keep a copy A; send C(x - A), then A = A + C(x - A) at both ends: A is what arrives.
As in arXiv 2401.07788, a boundary has one buffer for each direction, in which a sample meets the one that had its place
in the micro-batch before. A message that is not finite is passed on, so that the step is skipped, and not remembered.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.boundary.contract import Compressor, Leg, MessageShape, Passage
from thinpipe.core.errors import UserError


class ErrorFeedback(Leg):
    """Kept where the message is encoded. Validation is sent without what is owed to training."""

    def __init__(self, compressor: Compressor, shape: MessageShape, store: Path | None = None) -> None:
        super().__init__(compressor, shape, store)
        self.error_BTW = self._marked_BTW = empty_memory(shape)

    def encode(self, values_BTW: Tensor, passage: Passage) -> Tensor:
        if not passage.training:
            return self.compressor.encode(values_BTW, passage)
        owed_BTW = values_BTW + self.error_BTW.to(values_BTW.device)
        data = self.compressor.encode(owed_BTW, passage)
        self.error_BTW = finite_or(owed_BTW - self.compressor.decode(data, passage), self.error_BTW)
        return data

    def mark(self) -> None:
        self._marked_BTW = self.error_BTW  # which is replaced and never written to

    def go_back(self) -> None:
        self.error_BTW = self._marked_BTW

    def encoder_state(self) -> dict[str, Tensor]:
        return {"error_BTW": self.error_BTW}

    def load_encoder_state(self, state: Mapping[str, Tensor]) -> None:
        self.error_BTW = remembered(state, "error_BTW", self.error_BTW)


class Ef21(Leg):
    """Kept at both ends, which see the same messages and so stay equal. Validation uses the copy as it is."""

    def __init__(self, compressor: Compressor, shape: MessageShape, store: Path | None = None) -> None:
        super().__init__(compressor, shape, store)
        self.sent_BTW, self.received_BTW = empty_memory(shape), empty_memory(shape)
        self.mark()

    def encode(self, values_BTW: Tensor, passage: Passage) -> Tensor:
        self.sent_BTW = self.sent_BTW.to(values_BTW.device)
        data = self.compressor.encode(values_BTW - self.sent_BTW, passage)
        if passage.training:
            self.sent_BTW = finite_or(self.sent_BTW + self.compressor.decode(data, passage), self.sent_BTW)
        return data

    def decode(self, data: Tensor, passage: Passage) -> Tensor:
        self.received_BTW = self.received_BTW.to(data.device)
        values_BTW = self.received_BTW + self.compressor.decode(data, passage)
        if passage.training:
            self.received_BTW = finite_or(values_BTW, self.received_BTW)
        return values_BTW

    def mark(self) -> None:
        self._marked = self.sent_BTW, self.received_BTW

    def go_back(self) -> None:
        self.sent_BTW, self.received_BTW = self._marked

    def encoder_state(self) -> dict[str, Tensor]:
        return {"copy_BTW": self.sent_BTW}

    def decoder_state(self) -> dict[str, Tensor]:
        return {"copy_BTW": self.received_BTW}

    def load_encoder_state(self, state: Mapping[str, Tensor]) -> None:
        self.sent_BTW = remembered(state, "copy_BTW", self.sent_BTW)

    def load_decoder_state(self, state: Mapping[str, Tensor]) -> None:
        self.received_BTW = remembered(state, "copy_BTW", self.received_BTW)


def empty_memory(shape: MessageShape) -> Tensor:
    return torch.zeros(shape.batch, shape.tokens, shape.width)


def finite_or(new: Tensor, old: Tensor) -> Tensor:
    return new if new.isfinite().all() else old


def remembered(state: Mapping[str, Tensor], name: str, here: Tensor) -> Tensor:
    saved = state.get(name)
    if saved is None or saved.shape != here.shape:
        was = "nothing" if saved is None else f"a memory of {tuple(saved.shape)}"
        raise UserError(
            f"there is {was} where a boundary remembers {tuple(here.shape)} numbers: go on with the [boundary], "
            "micro-batches and sequences that the checkpoint was saved with, or begin a new run with model.initial"
        )
    return saved
