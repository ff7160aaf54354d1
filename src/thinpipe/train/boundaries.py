"""The method of every boundary of a run, from its settings: what both ends of a boundary make, and what plans count."""

import torch

from thinpipe.boundary.contract import BoundaryMethod, MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.models.config import ModelConfig
from thinpipe.train.config import RunConfig


def boundary_method(model: ModelConfig, config: RunConfig) -> BoundaryMethod:
    """A new one: methods may remember, so each boundary needs its own."""
    shape = MessageShape(
        batch=config.microbatch_size,
        tokens=config.training.seq_len,
        width=model.state_width,
        vocab_size=model.vocab_size,
        dtype=getattr(torch, config.training.dtype),
    )
    confined = model.subspace.width is not None
    return make_method(config.boundary, shape, confined=confined, seed=config.debug.seed)
