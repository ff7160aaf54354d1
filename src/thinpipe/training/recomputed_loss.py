"""Losses that follow from a checkpoint, with one segment in memory at a time: of the step after it, and of any batch.

The step after a checkpoint starts from the checkpoint's weights, basis, codec state and data cursor, and everything
random in it is derived from the seed and the step. So whoever has checkpoint and tokens can tell its loss without
trusting the processes that trained: to the bit on like devices, and within `loss_band` on others. The loss of a batch
of one's own depends on the weights alone, so that it shows what training has come to, whatever was reported.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod, MessageId
from thinpipe.checkpoint import Checkpoint
from thinpipe.checkpoint.codec_state import restore_codec_states
from thinpipe.checkpoint.state import pipeline_config_of, refuse_other_base, restore
from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.model import ExecutionConfig
from thinpipe.config.precision import recipe_of
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import from_table
from thinpipe.data import Cursor
from thinpipe.models import Segment, materialise
from thinpipe.models.hf.base_statement import base_sha256
from thinpipe.models.protocol import PipelineSegment, base_hashes, build_model, trainable_parameters
from thinpipe.pipeline.boundary_methods import boundary_method
from thinpipe.pipeline.chat_loss import ChatLoss
from thinpipe.pipeline.in_process_boundary import cross_boundary
from thinpipe.pipeline.runner import mean_of
from thinpipe.pipeline.stage_module import StageModule
from thinpipe.training.data_loading import TokenSource
from thinpipe.training.engine import Ids
from thinpipe.training.step_vector import trained_scale
from thinpipe.training.weight_sketch import Sketch, sketch_layers

_BAND, _BAND_OF_BF16 = 1e-3, 1e-2
"""Relative differences of a loss between devices. Sums in another order differ by 1e-7 in float32 and by up to 1e-4 in
matrix products of bfloat16 (docs/howto/selftest.md); messages of few bits may differ in a bit."""


def loss_band(config: RunConfig) -> float:
    """Largest relative difference between a loss and the same loss computed on another device."""
    return _BAND if config.training.precision in ("fp32", "fp64") else _BAND_OF_BF16


@dataclass(frozen=True)
class RecomputedLosses:
    next_step: float
    """Mean loss of the step after the checkpoint, as in training."""
    own_batch: float | None
    """Mean loss of a batch of the caller's choice, as in validation; None: none was given."""
    sketches: dict[str, Sketch]
    """Of each layer's weights (`training.weight_sketch`)."""


@torch.no_grad()
def recompute_losses(
    checkpoint: Checkpoint,
    source: TokenSource,
    own_batch_BW: Ids | None = None,
    *,
    sketch_seed: int = 0,
    on_segment: Callable[[int], None] = lambda _index: None,
) -> RecomputedLosses:
    """Losses that follow from the checkpoint, on the CPU. `on_segment` is called before each segment is read.
    `sketch_seed`: sketches of the same seed can be compared.

    Memory: the weights of one segment, without gradients and moments, and the states of all micro-batches.
    """
    config = from_table(tomllib.loads(checkpoint.manifest.run), RunConfig, where=str(checkpoint.path))
    recipe = recipe_of(config.training.precision, has_bf16_units=None, device="the CPU")
    model_config, seed, step = pipeline_config_of(checkpoint), config.debug.seed, checkpoint.manifest.step
    model = build_model(model_config)
    model.set_execution(ExecutionConfig(), autocast_bf16=recipe.autocast_bf16)
    chats, packing = source.dataset_info.chats, bool(config.training.packing)
    methods = [boundary_method(model_config, config, chats=chats) for _ in range(len(model.segments) - 1)]
    if step:  # weights that no step has changed come without codec state
        restore_codec_states(checkpoint, methods, range(len(model.segments)))
    size = config.microbatch_size
    next_ids = source.batch(Cursor(samples_seen=checkpoint.manifest.samples_seen))
    losses = [ChatLoss(packing=packing) if chats else None for _ in range(2)]
    next_step = _ForwardPass(next_ids, size, methods, losses[0], seed=seed, step=step, training=True)
    passes = [next_step]
    if own_batch_BW is not None:  # before the step, which changes codec state that validation reads
        passes.insert(0, _ForwardPass(own_batch_BW, size, methods, losses[1], seed=seed, step=0, training=False))
    sketches: dict[str, Sketch] = {}
    for index, segment in enumerate(model.segments):
        on_segment(index)
        _read_first_weights(segment, seed, getattr(torch, recipe.weights))
        parameters = trainable_parameters(segment)
        restore(checkpoint, parameters, model.space)
        sketches |= sketch_layers(parameters, seed=sketch_seed)
        for forward_pass in passes:
            stage = StageModule(
                model.segments, range(index, index + 1), methods, seed=seed, chat_loss=forward_pass.chat_loss
            )
            forward_pass.through(stage)
        segment.release()
    if isinstance(model_config, HuggingFaceModelConfig):
        refuse_other_base(model_config.source, base_sha256(base_hashes(model.segments)), checkpoint)
    return RecomputedLosses(next_step.loss, passes[0].loss if len(passes) > 1 else None, sketches)


def _read_first_weights(segment: PipelineSegment, seed: int, dtype: torch.dtype) -> None:
    """Gives a segment memory, and the frozen weights that no checkpoint has."""
    if isinstance(segment, Segment):
        materialise(segment, seed=seed, dtype=dtype, draw=False)
    else:
        segment.materialise(seed=seed, device=torch.device("cpu"), dtype=dtype)


class _ForwardPass:
    """One batch on its way through the segments, in micro-batches."""

    def __init__(
        self,
        ids_BW: Ids,
        microbatch_size: int,
        methods: Sequence[BoundaryMethod],
        chat_loss: ChatLoss | None,
        *,
        seed: int,
        step: int,
        training: bool,
    ) -> None:
        self._batches = torch.from_numpy(ids_BW).split(microbatch_size)
        self.chat_loss, self._tokens = chat_loss, ids_BW[:, 1:].size
        self._states: list[Tensor | None] = [None] * len(self._batches)
        self._methods, self._seed, self._step, self._training = methods, seed, step, training

    def through(self, stage: StageModule) -> None:
        """Moves all micro-batches over the boundary before this segment and through it."""
        stage.train(self._training)
        boundary = stage.indices.start - 1
        for microbatch, ids in enumerate(self._batches):
            state = self._states[microbatch]
            if state is not None:
                message = MessageId(
                    seed=self._seed,
                    step=self._step,
                    microbatch=microbatch,
                    boundary=boundary,
                    training=self._training,
                )
                method = self._methods[boundary]
                state = cross_boundary(state, ids, method if self._training else method.at_inference, message)
            stage.begin(ids, step=self._step, microbatch=microbatch, backward_follows=self._training)
            self._states[microbatch] = stage(state)

    @property
    def loss(self) -> float:
        """Once the last segment is done."""
        mean = mean_of([loss for loss in self._states if loss is not None])
        return mean if self.chat_loss is None else mean * trained_scale(self.chat_loss.trained_tokens, self._tokens)
