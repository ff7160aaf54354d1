"""Construction of a boundary method (message codec) from the settings of a run, for the stages of its pipeline."""

import torch

from thinpipe.boundary.contract import BoundaryMethod, MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.config.model import ModelConfig
from thinpipe.config.run import RunConfig


def boundary_method(model: ModelConfig, config: RunConfig) -> BoundaryMethod:
    """A new boundary method. Methods may have codec state, so every boundary needs its own instance."""
    shape = MessageShape(
        batch=config.microbatch_size,
        tokens=config.training.seq_len,
        width=model.state_width,
        vocab_size=model.vocab_size,
        dtype=getattr(torch, config.planned_recipe.weights),
    )
    in_subspace = model.subspace.width is not None
    return make_method(config.boundary, shape, in_subspace=in_subspace, seed=config.debug.seed)
