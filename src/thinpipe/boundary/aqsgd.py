"""AQ-SGD (arXiv 2206.01299): sends the compressed change of a sample's state since the sample's previous visit.

Both ends keep a state m per sample; send C(x - m), then m = m + C(x - m) at both ends; m is decoded. A sample's key is
a hash of its token ids, which both ends have, so no key is sent. The paper sends the first epoch uncompressed; here m
starts at zero, so that the first message of a sample is C(x) and all messages have the same length.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from thinpipe.boundary.contract import Compressor, DirectionCodec, MessageContext, MessageShape
from thinpipe.boundary.row_store import RowStore
from thinpipe.core.errors import UserError


class AqSgd(DirectionCodec):
    """AQ-SGD. Codec state at both ends: one state per sample. Validation reads it (usually zero for its samples), but
    does not change it."""

    def __init__(self, compressor: Compressor, shape: MessageShape, store: Path | None = None) -> None:
        super().__init__(compressor, shape, store)
        width = shape.tokens * shape.width
        self.sent, self.received = RowStore(width, store), RowStore(width, store)

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        last_visit_BTW = self._last_visit(self.sent, context).to(values_BTW.device)
        data = self.compressor.encode(values_BTW - last_visit_BTW, context)
        self._update_store(self.sent, last_visit_BTW + self.compressor.decode(data, context), context)
        return data

    def decode(self, data: Tensor, context: MessageContext) -> Tensor:
        last_visit_BTW = self._last_visit(self.received, context).to(data.device)
        values_BTW = last_visit_BTW + self.compressor.decode(data, context)
        self._update_store(self.received, values_BTW, context)
        return values_BTW

    def _last_visit(self, store: RowStore, context: MessageContext) -> Tensor:
        return store.read(_keys(context)).view(self.shape.batch, self.shape.tokens, self.shape.width)

    def _update_store(self, store: RowStore, values_BTW: Tensor, context: MessageContext) -> None:
        if context.training and values_BTW.isfinite().all():
            store.write(_keys(context), values_BTW.flatten(1))

    def snapshot(self) -> None:
        self.sent.snapshot()
        self.received.snapshot()

    def rollback(self) -> None:
        self.sent.rollback()
        self.received.rollback()

    def encoder_state(self) -> dict[str, Tensor]:
        return self.sent.state()

    def decoder_state(self) -> dict[str, Tensor]:
        return self.received.state()

    def load_encoder_state(self, state: Mapping[str, Tensor]) -> None:
        _load(self.sent, state)

    def load_decoder_state(self, state: Mapping[str, Tensor]) -> None:
        _load(self.received, state)


def _keys(context: MessageContext) -> list[int]:
    assert context.ids_BW is not None
    hashes = (hashlib.blake2b(ids.tobytes(), digest_size=8) for ids in context.ids_BW.cpu().numpy())
    return [int.from_bytes(found.digest(), "little", signed=True) for found in hashes]


def _load(store: RowStore, state: Mapping[str, Tensor]) -> None:
    if "rows" not in state or state["rows"].shape[1] != store.width:
        raise UserError(
            f"there is no store of samples of {store.width} numbers: go on with the [boundary] and sequences that the "
            "checkpoint was saved with, or begin a new run with model.initial"
        )
    store.load(state)
