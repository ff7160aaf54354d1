"""Labels of a pipeline whose messages hold no token ids: the process with the first stage sends those of each
micro-batch straight to the process with the last stage, which needs them for the loss.

So the stages between see neither ids nor labels.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.boundary.packing import pack_ids, unpack_ids
from thinpipe.boundary.sizes import MessageSize
from thinpipe.core.token_flags import ID_MASK
from thinpipe.pipeline.p2p import LABELS_TAG, P2PReceiver, P2PSender
from thinpipe.pipeline.placement import Placement
from thinpipe.transport.labels import Label


class LabelLink:
    """This process's end of the link. Nothing is sent if both stages are in one process, as ZBVZeroBubble places them,
    or if ids cross the boundaries; processes between have no end."""

    def __init__(self, size: MessageSize, placement: Placement, group: dist.ProcessGroup, device: torch.device) -> None:
        first, last, rank = placement.process_of_segment[0], placement.last_process, group.rank()
        self._size = size
        self._kept: dict[int, Tensor] = {}
        """Labels by micro-batch, if both stages are in this process."""
        self._is_short = first == last == rank and not size.has_ids
        is_sent = first != last and not size.has_ids
        self.sender: P2PSender | None = None
        self.receiver: P2PReceiver | None = None
        if is_sent and rank == first:
            self.sender = P2PSender(group, last, LABELS_TAG, name="labels to the last stage", device=device)
        if is_sent and rank == last:
            self.receiver = P2PReceiver(group, first, LABELS_TAG, name="labels from stage 0", device=device)

    def begin(self, microbatches: int, label: Label) -> None:
        """Starts a step, or validation, with this label; posts its receives."""
        self._label = label
        if self.receiver is not None:
            self.receiver.expect(microbatches, self._size.labels_nbytes, label)

    def give(self, ids_BW: Tensor, microbatch: int) -> None:
        """Called by the first stage, with the token ids of a micro-batch."""
        if self.sender is not None:
            labels = pack_ids(ids_BW[:, 1:] & ID_MASK, self._size.vocab_size)
            self.sender.send(labels, self._label, microbatch)
        elif self._is_short:
            self._kept[microbatch] = ids_BW[:, 1:] & ID_MASK

    def complete(self, ids_BW: Tensor, microbatch: int) -> Tensor:
        """Called by the last stage: the token ids that came with its state, in which the ids of all labels are 0, with
        the labels of the micro-batch. Token ids that have come whole are returned as they are."""
        labels_BT = self._take(microbatch)
        if labels_BT is None:
            return ids_BW
        return torch.cat((ids_BW[:, :1], ids_BW[:, 1:] | labels_BT), dim=1)

    def _take(self, microbatch: int) -> Tensor | None:
        if self.receiver is None:
            return self._kept.pop(microbatch, None)
        packed = self.receiver.receive(microbatch)
        return unpack_ids(packed, (self._size.batch, self._size.tokens), self._size.vocab_size)
