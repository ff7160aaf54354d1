"""What one segment computes on one micro-batch, with the seed that names its place: the same wherever it runs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.core.seeds import derive_seed
from thinpipe.models import Segment


class SegmentWork(nn.Module):
    """The state of the segment before in (nothing for the first), its own state or the mean loss out.

    Ids, step and micro-batch are set with `begin`: only what has a gradient is an argument, as torch's zero-bubble
    backward passes want it. Ids have W = T + 1 tokens, so that the last segment has its labels.
    """

    def __init__(self, segment: Segment, index: int, seed: int) -> None:
        super().__init__()
        self.segment, self.index, self.seed = segment, index, seed
        self.ids_BW = torch.empty(0, 0, dtype=torch.int64)
        self.dropout_seed = 0

    def begin(self, ids_BW: Tensor, *, step: int, microbatch: int) -> None:
        self.ids_BW = ids_BW
        self.dropout_seed = derive_seed(self.seed, "dropout", step, microbatch, self.index)

    def forward(self, state: Tensor | None = None) -> Tensor:
        torch.manual_seed(self.dropout_seed)
        out: Tensor = self.segment(self.ids_BW[:, :-1], state if self.segment.first is None else None)
        return out if self.segment.last is None else token_losses(out, self.ids_BW).mean()


def token_losses(logits_BTV: Tensor, ids_BW: Tensor) -> Tensor:
    """Cross-entropy of every token, in float32 at least."""
    logits = logits_BTV.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, ids_BW[:, 1:].flatten(), reduction="none")
