"""Construction of a boundary method (message codec) from the settings of a run, for the stages of its pipeline."""

import torch

from thinpipe.boundary.contract import BoundaryMethod, MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.boundary.sizes import ids_cross
from thinpipe.config.run import RunConfig
from thinpipe.models.protocol import PipelineModelConfig


def boundary_method(model: PipelineModelConfig, config: RunConfig, *, chats: bool = False) -> BoundaryMethod:
    """A new boundary method. Methods may have codec state, so every boundary needs its own instance. `chats`: token ids
    have flags."""
    shape = MessageShape(
        batch=config.microbatch_size,
        tokens=config.training.seq_len,
        width=model.state_width,
        vocab_size=model.vocab_size,
        has_flags=chats,
        has_ids=ids_cross(config.boundary, segments_need_ids=model.segments_need_ids),
        dtype=getattr(torch, config.planned_recipe.weights),
    )
    return make_method(config.boundary, shape, in_subspace=model.in_subspace, seed=config.debug.seed)
