"""Loss of a training step, computed again from the checkpoint before it, with one segment in memory at a time.

The step after a checkpoint starts from the checkpoint's weights, basis, codec state and data cursor, and everything
random in it is derived from the seed and the step. So whoever has checkpoint and tokens can tell its loss without
trusting the processes that trained: to the bit on like devices, and within `loss_band` on others.
"""

import tomllib
from collections.abc import Callable

import torch
from torch import Tensor

from thinpipe.boundary.contract import MessageId
from thinpipe.checkpoint import Checkpoint
from thinpipe.checkpoint.codec_state import restore_codec_states
from thinpipe.checkpoint.state import model_config_of, restore
from thinpipe.config.model import ExecutionConfig
from thinpipe.config.precision import recipe_of
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import from_table
from thinpipe.data import Cursor
from thinpipe.models import build, materialise
from thinpipe.pipeline.boundary_methods import boundary_method
from thinpipe.pipeline.in_process_boundary import cross_boundary
from thinpipe.pipeline.runner import mean_of
from thinpipe.pipeline.stage_module import StageModule
from thinpipe.training.data_loading import TokenSource

_BAND, _BAND_OF_BF16 = 1e-3, 1e-2
"""Relative differences of a loss between devices. Sums in another order differ by 1e-7 in float32 and by up to 1e-4 in
matrix products of bfloat16 (docs/howto/selftest.md); messages of few bits may differ in a bit."""


def loss_band(config: RunConfig) -> float:
    """Largest relative difference between a loss and the same loss computed on another device."""
    return _BAND if config.training.precision in ("fp32", "fp64") else _BAND_OF_BF16


@torch.no_grad()
def recompute_loss(
    checkpoint: Checkpoint, source: TokenSource, *, on_segment: Callable[[int], None] = lambda _index: None
) -> float:
    """Mean loss of the step after `checkpoint`, on the CPU. `on_segment` is called before each segment is read.

    Memory: the weights of one segment, without gradients and moments, and the states of all micro-batches.
    """
    config = from_table(tomllib.loads(checkpoint.manifest.run), RunConfig, where=str(checkpoint.path))
    recipe = recipe_of(config.training.precision, has_bf16_units=None, device="the CPU")
    model_config, seed, step = model_config_of(checkpoint), config.debug.seed, checkpoint.manifest.step
    model = build(model_config)
    model.set_execution(ExecutionConfig(), autocast_bf16=recipe.autocast_bf16)
    model.train()
    methods = [boundary_method(model_config, config) for _ in range(len(model.segments) - 1)]
    restore_codec_states(checkpoint, methods, range(len(model.segments)))
    ids_BW = torch.from_numpy(source.batch(Cursor(samples_seen=checkpoint.manifest.samples_seen)))
    batches = ids_BW.split(config.microbatch_size)
    states: list[Tensor | None] = [None] * len(batches)
    for index, segment in enumerate(model.segments):
        on_segment(index)
        materialise(segment, seed=seed, dtype=getattr(torch, recipe.weights), draw=False)
        restore(checkpoint, dict(segment.named_parameters()), model.space)
        stage = StageModule(model.segments, range(index, index + 1), methods, seed=seed)
        for microbatch, ids in enumerate(batches):
            state = states[microbatch]
            if state is not None:
                message = MessageId(seed=seed, step=step, microbatch=microbatch, boundary=index - 1, training=True)
                state = cross_boundary(state, ids, methods[index - 1], message)
            stage.begin(ids, step=step, microbatch=microbatch)
            states[microbatch] = stage(state)
        segment.to("meta")
    return mean_of([loss for loss in states if loss is not None])
