"""What every segment of a model needs of the machine that trains it: the law by which segments are given out.

Floating-point operations per token, forward and backward, for S tokens in a sequence, D wide, K coordinates:

    6 x numbers in matrices   the head among them, embeddings not, for they are looked up
  + 12 x S x D per block      attention, as if nothing were masked: kernels that skip what is are slower per operation
  + 4 x D x K per read        of a confined stream, base + state Uᵀ (U has no gradient): two a block and one in `last`;
                              segments that write freely read once; as much again where gradients are tracked
    8 and 16 for 6 and 12     in blocks that are computed again (execution.checkpoint_activations)

Memory: weights, their gradients and moments; what one micro-batch keeps (`train/dry_run.py`) times those under way;
and what comes beside it while a segment computes. In bytes of tensors: Python, torch and its libraries come on top.

Held against real steps in `tests/train/test_costs.py`: 15 whole models on a CPU (Llama and GPT-2, dense and confined,
three sizes of 150 to 460 MB; bfloat16, checkpointed, cut), of which this law said 0.95 to 1.05 of what was measured;
operations within 2 % of torch's own count, and within 10 % where blocks are computed again. No GPU was measured.
"""

import torch
from torch import nn

from thinpipe.models.config import ModelConfig
from thinpipe.models.model import Model, Segment, build
from thinpipe.models.neck import Projector
from thinpipe.subspace import Subspace
from thinpipe.subspace.rowwise import second_moment_shape
from thinpipe.swarm.assign import Need, Traffic
from thinpipe.train.boundaries import boundary_method
from thinpipe.train.config import RunConfig
from thinpipe.train.dry_run import count_kept
from thinpipe.train.under_way import under_way


def segment_needs(model: ModelConfig, config: RunConfig, *, processes: int | None = None) -> list[Need]:
    """In order. `processes`: how many share the segments, if that is known; else as many as there are segments, which
    has the most micro-batches under way. What all segments of a machine share is not here: see `shared_nbytes`."""
    built, count = build(model), len(model.segments)
    return [
        Need(
            flops_per_token=_flops_per_token(segment, config),
            memory_nbytes=_memory_nbytes(segment, config, under_way(index, count, processes or count, config)),
        )
        for index, segment in enumerate(built.segments)
    ]


def shared_nbytes(model: ModelConfig, config: RunConfig) -> int:
    """What a machine has once, however many segments it has: frozen tables and the basis, with its tracker's sums."""
    built = build(model)
    held = sum(buffer.nbytes for buffer in _buffers(built))
    if isinstance(built.space, Subspace):
        held += 3 * built.space.basis_DK.nbytes  # a new basis beside the old one, and the sums
    return held * 2 if config.training.dtype == "float64" else held


def segment_state_nbytes(model: ModelConfig, config: RunConfig) -> list[int]:
    """Weights and moments of each segment: what a checkpoint holds, but for what boundaries remember."""
    return [_state_nbytes(segment, config) for segment in build(model).segments]


def boundary_traffic(model: ModelConfig, config: RunConfig) -> Traffic:
    """Nothing, for a model without boundaries."""
    if not model.boundaries:
        return Traffic(forward_nbytes=0, backward_nbytes=0)
    method = boundary_method(model, config)
    rows = method.shape.rows
    return Traffic(forward_nbytes=method.forward_nbytes / rows, backward_nbytes=method.backward_nbytes / rows)


def _buffers(model: Model) -> list[torch.Tensor]:
    return [buffer for _, buffer in model.named_buffers()]  # those that modules share are named once


def _flops_per_token(segment: Segment, config: RunConfig) -> float:
    model = segment.config
    attention = 2 * config.training.seq_len * model.n_heads * model.head_dim * len(segment.blocks)
    total = (8 if config.execution.checkpoint_activations else 6) * (_matrix_numbers(segment.blocks) + attention)
    ends = [part for part in (segment.first, segment.last, segment.necks) if part is not None]
    total += 6 * sum(map(_matrix_numbers, ends))
    if model.subspace.width is not None:
        total += 4 * model.dim * model.subspace.width * _products_with_basis(segment, config)
    return total


def _matrix_numbers(part: nn.Module) -> int:
    weights = [module.weight for module in part.modules() if isinstance(module, nn.Linear)]
    weights += [module.columns_DK for module in part.modules() if isinstance(module, Projector)]
    return sum(weight.numel() for weight in weights)


def _products_with_basis(segment: Segment, config: RunConfig) -> int:
    """Reads of the stream, and what the tracker of gradients does."""
    is_last = segment.last is not None
    tracked = int(is_last and config.basis.interval > 0)
    if not isinstance(segment.space, Subspace):
        return 1 + tracked
    return 2 * len(segment.blocks) + int(is_last) + tracked


def _memory_nbytes(segment: Segment, config: RunConfig, microbatches: int) -> int:
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    weights = sum(parameter.numel() for parameter in segment.parameters()) * dtype.itemsize
    kept = count_kept(
        segment, config.execution, batch=config.microbatch_size, tokens=config.training.seq_len, dtype=dtype
    )
    gradients, held = weights, microbatches * kept.nbytes + kept.at_work_nbytes
    # Gradients come as activations go, and stay for the next micro-batch if there is one.
    beside = gradients + held if config.microbatches > 1 else max(gradients, held)
    return _state_nbytes(segment, config) + beside


def _state_nbytes(segment: Segment, config: RunConfig) -> int:
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    rule = config.optimizer.second_moment
    numbers = sum(2 * each.numel() + second_moment_shape(each, rule).numel() for each in segment.parameters())
    return numbers * dtype.itemsize
