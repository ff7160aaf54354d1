"""How long the messages of a run are. Lengths are those that boundary methods state (`boundary/lengths.py`)."""

from dataclasses import dataclass

from thinpipe.boundary.lengths import MessageSize, backward_nbytes, forward_nbytes
from thinpipe.models.config import ModelConfig
from thinpipe.train.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Of one micro-batch at one boundary; payload, without what lines add to it (`transport/framing.py`)."""

    forward_nbytes: int
    """The state, and token ids behind it."""
    backward_nbytes: int
    """Its gradient."""
    ids_nbytes: int
    """Of the forward message."""


def message_nbytes(model: ModelConfig, config: RunConfig) -> Messages:
    """The same at every boundary of a model; nothing crosses if there is none."""
    if not model.boundaries:
        return Messages(forward_nbytes=0, backward_nbytes=0, ids_nbytes=0)
    config.boundary.method_for(confined=model.subspace.width is not None)
    size = MessageSize(
        batch=config.microbatch_size,
        tokens=config.training.seq_len,
        width=model.state_width,
        vocab_size=model.vocab_size,
    )
    return Messages(
        forward_nbytes=forward_nbytes(config.boundary, size),
        backward_nbytes=backward_nbytes(config.boundary, size),
        ids_nbytes=size.ids_nbytes,
    )
