"""AQ-SGD (arXiv 2206.01299): of every sample, only the change of its state since its last visit crosses.

Both ends keep m for every sample; send C(x - m), then m = m + C(x - m) at both ends, and m is what arrives. A sample's
key is a hash of its token ids, which both ends have, so it costs no bytes. The paper sends the first epoch whole; here
m begins at zero, so that the first visit is C(x) and every message is as short as the others.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from thinpipe.boundary.contract import Compressor, Leg, MessageShape, Passage
from thinpipe.boundary.store import RowStore
from thinpipe.core.errors import UserError


class AqSgd(Leg):
    """Kept at both ends. Validation uses what is known of its samples, mostly nothing, and adds nothing."""

    def __init__(self, compressor: Compressor, shape: MessageShape, store: Path | None = None) -> None:
        super().__init__(compressor, shape, store)
        width = shape.tokens * shape.width
        self.sent, self.received = RowStore(width, store), RowStore(width, store)

    def encode(self, values_BTW: Tensor, passage: Passage) -> Tensor:
        known_BTW = self._known(self.sent, passage).to(values_BTW.device)
        data = self.compressor.encode(values_BTW - known_BTW, passage)
        self._remember(self.sent, known_BTW + self.compressor.decode(data, passage), passage)
        return data

    def decode(self, data: Tensor, passage: Passage) -> Tensor:
        known_BTW = self._known(self.received, passage).to(data.device)
        values_BTW = known_BTW + self.compressor.decode(data, passage)
        self._remember(self.received, values_BTW, passage)
        return values_BTW

    def _known(self, store: RowStore, passage: Passage) -> Tensor:
        return store.read(_keys(passage)).view(self.shape.batch, self.shape.tokens, self.shape.width)

    def _remember(self, store: RowStore, values_BTW: Tensor, passage: Passage) -> None:
        if passage.training and values_BTW.isfinite().all():
            store.write(_keys(passage), values_BTW.flatten(1))

    def mark(self) -> None:
        self.sent.mark()
        self.received.mark()

    def go_back(self) -> None:
        self.sent.go_back()
        self.received.go_back()

    def encoder_state(self) -> dict[str, Tensor]:
        return self.sent.state()

    def decoder_state(self) -> dict[str, Tensor]:
        return self.received.state()

    def load_encoder_state(self, state: Mapping[str, Tensor]) -> None:
        _load(self.sent, state)

    def load_decoder_state(self, state: Mapping[str, Tensor]) -> None:
        _load(self.received, state)


def _keys(passage: Passage) -> list[int]:
    assert passage.ids_BW is not None
    hashes = (hashlib.blake2b(ids.tobytes(), digest_size=8) for ids in passage.ids_BW.cpu().numpy())
    return [int.from_bytes(found.digest(), "little", signed=True) for found in hashes]


def _load(store: RowStore, state: Mapping[str, Tensor]) -> None:
    if "rows" not in state or state["rows"].shape[1] != store.width:
        raise UserError(
            f"there is no store of samples of {store.width} numbers: go on with the [boundary] and sequences that the "
            "checkpoint was saved with, or begin a new run with model.initial"
        )
    store.load(state)
