"""Cost model of training: FLOPs and memory per segment, on which the partition of segments over machines is based.

FLOPs per token, forward and backward, for sequence length S, model width D and subspace width K:

    6 x matrix elements       including the output head, without embeddings (lookups)
  + 12 x S x D per block      attention, without the mask: kernels that skip masked parts run at a lower rate
  + 4 x D x K per read        of a subspace stream, base + state Uᵀ (U has no gradient): two per block and one in
                              `last`; one per segment where the stream is dense inside segments; one more read where
                              the basis tracker runs
    8 and 16 for 6 and 12     in blocks with activation checkpointing (execution.checkpoint_activations)

Memory: weights, gradients and optimizer moments; saved activations of a micro-batch (`train/dry_run.py`) times the
number of micro-batches in flight; and temporary tensors of a running segment. Bytes of tensors only: Python, torch and
its libraries come on top.

Checked against real steps in `tests/train/test_costs.py`: for 15 whole models on a CPU (Llama and GPT-2, dense and
subspace, three sizes of 150 to 460 MB; bfloat16, activation checkpointing, cut into segments) predicted memory is 0.95
to 1.05 of the measured; FLOPs are within 2 % of torch's own count, within 10 % with activation checkpointing. Not
measured on a GPU.
"""

import torch
from torch import nn

from thinpipe.config.model import ModelConfig
from thinpipe.config.run import RunConfig
from thinpipe.models.boundary_projection import OrthonormalProjection
from thinpipe.models.model import Model, Segment, build
from thinpipe.optim.rowwise_adamw import second_moment_shape
from thinpipe.pipeline.boundary_methods import boundary_method
from thinpipe.pipeline.placement import in_flight_microbatches
from thinpipe.plan.partition import SegmentNeeds, Traffic
from thinpipe.subspace import Subspace
from thinpipe.train.dry_run import count_saved_activations


def segment_needs(model: ModelConfig, config: RunConfig, *, processes: int | None = None) -> list[SegmentNeeds]:
    """FLOPs and memory of every segment, in model order.

    `processes`: number of processes that share the segments; default: one per segment, which has the most micro-batches
    in flight. Excludes memory that the segments of one machine share: see `shared_nbytes`.
    """
    built, count = build(model), len(model.segments)
    return [
        SegmentNeeds(
            flops_per_token=_flops_per_token(segment, config),
            memory_nbytes=_memory_nbytes(
                segment, config, in_flight_microbatches(index, count, processes or count, config)
            ),
        )
        for index, segment in enumerate(built.segments)
    ]


def shared_nbytes(model: ModelConfig, config: RunConfig) -> int:
    """Bytes needed once per machine, for any number of segments: fixed tables, basis and basis tracker sums."""
    built = build(model)
    held = sum(buffer.nbytes for buffer in _buffers(built))
    if isinstance(built.space, Subspace):
        held += 3 * built.space.basis_DK.nbytes  # a second basis during an update, and the tracker sums
    return held * 2 if config.training.dtype == "float64" else held


def segment_state_nbytes(model: ModelConfig, config: RunConfig) -> list[int]:
    """Bytes of weights and optimizer moments of each segment: its checkpoint size without codec state."""
    return [_state_nbytes(segment, config) for segment in build(model).segments]


def boundary_traffic(model: ModelConfig, config: RunConfig) -> Traffic:
    """Bytes per token over one boundary in each direction; 0 for a model without boundaries."""
    if not model.boundaries:
        return Traffic(forward_nbytes=0, backward_nbytes=0)
    method = boundary_method(model, config)
    rows = method.shape.rows
    return Traffic(forward_nbytes=method.forward_nbytes / rows, backward_nbytes=method.backward_nbytes / rows)


def _buffers(model: Model) -> list[torch.Tensor]:
    return [buffer for _, buffer in model.named_buffers()]  # named_buffers lists a shared buffer once


def _flops_per_token(segment: Segment, config: RunConfig) -> float:
    model = segment.config
    attention = 2 * config.training.seq_len * model.n_heads * model.head_dim * len(segment.blocks)
    total = (8 if config.execution.checkpoint_activations else 6) * (_matrix_numbers(segment.blocks) + attention)
    ends = [part for part in (segment.first, segment.last, segment.projections) if part is not None]
    total += 6 * sum(map(_matrix_numbers, ends))
    if model.subspace.width is not None:
        total += 4 * model.dim * model.subspace.width * _products_with_basis(segment, config)
    return total


def _matrix_numbers(part: nn.Module) -> int:
    weights = [module.weight for module in part.modules() if isinstance(module, nn.Linear)]
    weights += [module.columns_DK for module in part.modules() if isinstance(module, OrthonormalProjection)]
    return sum(weight.numel() for weight in weights)


def _products_with_basis(segment: Segment, config: RunConfig) -> int:
    """Number of products with the basis per token: reads of the stream, and one for the basis tracker."""
    is_last = segment.last is not None
    tracked = int(is_last and config.basis.interval > 0)
    if not isinstance(segment.space, Subspace):
        return 1 + tracked
    return 2 * len(segment.blocks) + int(is_last) + tracked


def _memory_nbytes(segment: Segment, config: RunConfig, microbatches: int) -> int:
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    weights = sum(parameter.numel() for parameter in segment.parameters()) * dtype.itemsize
    saved = count_saved_activations(
        segment, config.execution, batch=config.microbatch_size, tokens=config.training.seq_len, dtype=dtype
    )
    gradients, held = weights, microbatches * saved.nbytes + saved.peak_extra_nbytes
    # With one micro-batch, gradients are allocated as activations are freed, so the two do not add up. With more,
    # gradients stay allocated while the next micro-batch runs.
    beside = gradients + held if config.microbatches > 1 else max(gradients, held)
    return _state_nbytes(segment, config) + beside


def _state_nbytes(segment: Segment, config: RunConfig) -> int:
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    rule = config.optimizer.second_moment
    numbers = sum(2 * each.numel() + second_moment_shape(each, rule).numel() for each in segment.parameters())
    return numbers * dtype.itemsize
