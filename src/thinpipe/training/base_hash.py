"""The hash of the Hugging Face model that a run trains on, of which every process has read the tensors of its own
segments.

It is saved with every checkpoint, which has no frozen weights, and compared when the run goes on.
"""

from typing import Annotated

import msgspec

from thinpipe.core.bounds import Sha256
from thinpipe.core.foreign import decode_foreign
from thinpipe.models.protocol import base_hashes
from thinpipe.training.engine import Engine


class BaseHashes(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has read of the base."""

    tensors: Annotated[list[Sha256], msgspec.Meta(max_length=100_000)]
    """Hash of each tensor, its name included."""


def gather_base_sha256(engine: Engine) -> str:
    """Hash of the whole base; empty if the run has none. Collective call of a run that has one."""
    if engine.config.model.hf is None:
        return ""
    from thinpipe.models.hf.base_statement import base_sha256

    own = BaseHashes(tensors=sorted(base_hashes(engine.model.segments)))
    gathered = engine.collectives.all_gather_bytes(msgspec.json.encode(own))
    return base_sha256(value for each in gathered for value in decode_foreign(each, BaseHashes, form="json").tensors)
