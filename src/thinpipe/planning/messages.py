"""Sizes of the messages that cross the boundaries of a run, as declared by boundary methods (`boundary/sizes.py`)."""

from dataclasses import dataclass

from thinpipe.boundary.sizes import MessageSize, backward_nbytes, forward_nbytes, ids_cross
from thinpipe.config.run import RunConfig
from thinpipe.planning.partition import Traffic
from thinpipe.planning.stored_model import PlannedModel


@dataclass(frozen=True, kw_only=True)
class MessageSizes:
    """Payload of one micro-batch at one boundary, without protocol overhead (`transport/emulation/framing.py`)."""

    forward_nbytes: int
    """Hidden state and the token ids, or flags of chats, that follow it."""
    backward_nbytes: int
    """Gradient of the hidden state."""
    ids_nbytes: int
    """Token ids or flags, as a part of `forward_nbytes`."""
    labels_nbytes: int = 0
    """Labels, which go from the first stage to the last, where no ids cross the boundaries."""

    def traffic(self, config: RunConfig) -> Traffic:
        """Bytes per token over one boundary in each direction, and from the first stage to the last."""
        rows = config.microbatch_size * config.training.seq_len
        return Traffic(
            forward_nbytes=self.forward_nbytes / rows,
            backward_nbytes=self.backward_nbytes / rows,
            labels_nbytes=self.labels_nbytes / rows,
        )


def message_sizes(model: PlannedModel, config: RunConfig, *, chats: bool = False) -> MessageSizes:
    """Sizes for the run; they are the same at every boundary, and 0 for a model without boundaries. `chats`: ids have
    flags."""
    if not model.boundaries:
        return MessageSizes(forward_nbytes=0, backward_nbytes=0, ids_nbytes=0)
    config.boundary.resolve_method(in_subspace=model.in_subspace)
    size = MessageSize(
        batch=config.microbatch_size,
        tokens=config.training.seq_len,
        width=model.state_width,
        vocab_size=model.vocab_size,
        has_flags=chats,
        has_ids=ids_cross(config.boundary, segments_need_ids=model.segments_need_ids),
    )
    return MessageSizes(
        forward_nbytes=forward_nbytes(config.boundary, size),
        backward_nbytes=backward_nbytes(config.boundary, size),
        ids_nbytes=size.ids_nbytes,
        labels_nbytes=size.labels_nbytes,
    )
