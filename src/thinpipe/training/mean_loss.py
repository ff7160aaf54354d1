"""Mean loss of a whole model on batches, without pipeline and boundary encoding: for models at rest."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from thinpipe.core.token_flags import ID_MASK, TRAINED
from thinpipe.models import Model
from thinpipe.training.engine import Ids

if TYPE_CHECKING:
    from thinpipe.models.hf.decoder import HuggingFaceModel


@torch.no_grad()
def mean_loss(
    model: "Model | HuggingFaceModel", batches: Iterable[Ids], device: torch.device | str, *, chats: bool = False
) -> tuple[float, int]:
    """Mean loss over all tokens of all batches (of any size) and the number of tokens; of chats, over the trained ones.
    No boundary encoding."""
    total, tokens = 0.0, 0
    for ids_BW in batches:
        flagged = torch.from_numpy(ids_BW).to(device)
        ids = flagged & ID_MASK if chats else flagged
        losses = model(ids[:, :-1], targets_BT=ids[:, 1:])
        if chats:
            losses = losses[(flagged[:, 1:] & TRAINED != 0).flatten()]
        total += losses.cpu().double().sum().item()
        tokens += losses.numel()
    return total / max(1, tokens), tokens
