"""What a stage does with the flags of chats (`core.token_flags`): the ids without them, positions of packed chats, and
a loss that counts the tokens that are trained on alone.

The loss of a step is a mean over the trained tokens of its whole batch, of which a stage sees one micro-batch after the
other. So stages divide by the number of all tokens, which is known beforehand, and the sums at the end of the step are
multiplied by the number of all tokens over that of the trained ones (`training.step_vector`).
"""

import torch
from torch import Tensor

from thinpipe.core.token_flags import BEGINS, ID_MASK, TRAINED


class ChatLoss:
    """`packing`: rows hold several chats, so that positions begin again with each."""

    def __init__(self, *, packing: bool) -> None:
        self.packing = packing
        self._counts: list[Tensor] = []

    def begin(self) -> None:
        """Starts a batch."""
        self._counts.clear()

    def ids(self, flagged_BW: Tensor) -> Tensor:
        return flagged_BW & ID_MASK

    def position_ids(self, flagged_BT: Tensor) -> Tensor | None:
        """Positions within each chat of a row; None if a row is one chat."""
        return positions_in_documents(flagged_BT & BEGINS != 0) if self.packing else None

    def mean(self, losses_N: Tensor, flagged_BT: Tensor) -> Tensor:
        """Sum of the losses of trained tokens, divided by the number of all tokens. `flagged_BT`: the targets."""
        trained_N = (flagged_BT & TRAINED != 0).flatten()
        self._counts.append(trained_N.sum())
        return torch.where(trained_N, losses_N, 0).sum() / losses_N.numel()

    @property
    def trained_tokens(self) -> int:
        """Of the batch so far, in the process with the last segment; 0 elsewhere. One synchronisation."""
        return int(torch.stack(self._counts).sum()) if self._counts else 0


def positions_in_documents(begins_BT: Tensor) -> Tensor:
    """Distance of each token from the last one before it, or itself, with which a document begins."""
    places_BT = torch.arange(begins_BT.shape[1], device=begins_BT.device).expand_as(begins_BT)
    return places_BT - torch.where(begins_BT, places_BT, 0).cummax(dim=1).values
