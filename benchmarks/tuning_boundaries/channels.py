"""How much larger than the others the largest channel is that crosses a boundary."""

from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod, MessageId
from thinpipe.checkpoint import find_checkpoint
from thinpipe.config.run import RunConfig
from thinpipe.training.trainer import Trainer

_ENCODE = BoundaryMethod.encode_state


def largest_channels(config: RunConfig, weights: Path) -> list[float]:
    """For each boundary, over validation: the largest magnitude in any channel, divided by that in the median one."""
    largest_W: dict[int, Tensor] = {}

    def observed(method: BoundaryMethod, state: Tensor, ids_BW: Tensor | None, message_id: MessageId) -> Tensor:
        found_W, at = state.detach().float().abs().amax((0, 1)), message_id.boundary
        largest_W[at] = found_W.maximum(largest_W[at]) if at in largest_W else found_W
        return _ENCODE(method, state, ids_BW, message_id)

    trainer = Trainer(config)
    trainer.engine.start_from(find_checkpoint(weights, trainer.engine.layers))
    with patch.object(BoundaryMethod, "encode_state", observed):
        trainer.engine.evaluate(trainer.batch_loader.validation_batches())
    return [round(float(found_W.max() / found_W.median()), 2) for _, found_W in sorted(largest_W.items())]
