"""Compute and memory needs of every segment: the cost model of `train/costs.py` on arithmetic shapes, without torch.

Bytes are those of tensors; Python, torch and its libraries are not included.
"""

from dataclasses import dataclass

from thinpipe.config.model import LlamaConfig, ModelConfig
from thinpipe.config.run import RunConfig
from thinpipe.pipeline.placement import in_flight_microbatches
from thinpipe.plan.activations import ITEMSIZES, count_saved_activations
from thinpipe.plan.parameters import ParameterGroup, SegmentShapes, segment_shapes

__all__ = ["SegmentNeed", "in_flight_microbatches", "memory_nbytes", "segment_needs", "shared_nbytes"]


@dataclass(frozen=True, kw_only=True)
class SegmentNeed:
    """FLOPs and bytes of one segment."""

    parameters: int
    """Number of trainable parameters."""
    forward_flops_per_token: float
    backward_flops_per_token: float
    """Backward pass, with the recomputation of checkpointed blocks."""
    weights_nbytes: int
    gradients_nbytes: int
    optimiser_nbytes: int
    activation_nbytes: int
    """Activations saved by one micro-batch between its forward and its backward pass."""
    peak_extra_nbytes: int
    """Additional bytes while the segment computes."""
    tables_nbytes: int
    """Part of `weights_nbytes`: tables looked up by token, bigram or position, and the matrices that project their rows
    up."""


def segment_needs(model: ModelConfig, config: RunConfig) -> list[SegmentNeed]:
    """Needs of every segment, in model order, without what the segments of a machine share (`shared_nbytes`)."""
    return [_need(model, config, index, shapes) for index, shapes in enumerate(segment_shapes(model))]


def memory_nbytes(need: SegmentNeed, config: RunConfig, n_microbatches: int) -> int:
    """Peak bytes of a segment with `n_microbatches` in flight. Gradients replace activations as the backward pass goes,
    but with several micro-batches they stay while the next one needs its activations."""
    held = n_microbatches * need.activation_nbytes + need.peak_extra_nbytes
    gradients_and_activations = (
        need.gradients_nbytes + held if config.microbatches > 1 else max(need.gradients_nbytes, held)
    )
    return need.weights_nbytes + need.optimiser_nbytes + gradients_and_activations


def shared_nbytes(model: ModelConfig, config: RunConfig) -> int:
    """Bytes that a machine holds once for all its segments: frozen tables, and the basis with its tracker's sums."""
    held = 0
    if isinstance(model, LlamaConfig):
        held += 2 * model.max_seq_len * model.head_dim * 4  # cosines and sines
    if model.subspace.width is not None:
        rows = [model.vocab_size, model.max_seq_len] if model.has_position_table else [model.vocab_size]
        held += sum(_frozen_table_nbytes(model, count) for count in rows)
        held += 4 * model.dim * model.subspace.width * 4  # a new basis beside the old one, and the tracker's two sums
    return held * 2 if config.training.dtype == "float64" else held


def _frozen_table_nbytes(model: ModelConfig, rows: int) -> int:
    if model.subspace.fixed == "signs":
        return rows * -(-model.dim // 8) + 256 * 8  # packed bits, and the 8 signs of every byte value
    return rows * model.dim * 4


def _need(model: ModelConfig, config: RunConfig, index: int, shapes: SegmentShapes) -> SegmentNeed:
    itemsize = ITEMSIZES[config.training.dtype]
    numel = sum(each.numel for each in shapes.unique_parameters)
    second_moments = sum(each.second_moment(config.optimizer.second_moment) for each in shapes.unique_parameters)
    forward, backward = _flops_per_token(model, config, index, shapes)
    saved = count_saved_activations(model, config, index, shapes)
    return SegmentNeed(
        parameters=numel,
        forward_flops_per_token=forward,
        backward_flops_per_token=backward,
        weights_nbytes=numel * itemsize,
        gradients_nbytes=numel * itemsize,
        optimiser_nbytes=(numel + second_moments) * itemsize,
        activation_nbytes=saved.nbytes,
        peak_extra_nbytes=saved.peak_extra_nbytes,
        tables_nbytes=itemsize * sum(each.numel for each in shapes.unique_parameters if each.is_table),
    )


def _flops_per_token(model: ModelConfig, config: RunConfig, index: int, shapes: SegmentShapes) -> tuple[float, float]:
    attention = 2 * config.training.seq_len * model.dim * shapes.blocks
    blocks = 2 * (_matmul_numel(shapes.block) * shapes.blocks + attention)
    ends = 2 * _matmul_numel(shapes.ends)
    reads, tracked = _reads_of_basis(model, index, shapes), 0
    if model.subspace.width is not None and shapes.last and config.basis.interval > 0:
        tracked = 4 * model.dim * model.subspace.width
    again = blocks if config.execution.checkpoint_activations else 0
    return float(blocks + ends + reads), float(2 * (blocks + ends) + reads + again + tracked)


def _matmul_numel(group: ParameterGroup) -> int:
    return sum(each.numel for each in group if each.is_matmul)


def _reads_of_basis(model: ModelConfig, index: int, shapes: SegmentShapes) -> int:
    """FLOPs per token of reconstructing the stream, base + state Uᵀ; as many forward as backward."""
    if model.subspace.width is None:
        return 0
    in_subspace = model.segments[index].start < model.first_free_block
    reads = 2 * shapes.blocks + int(bool(shapes.last)) if in_subspace else 1
    return 2 * model.dim * model.subspace.width * reads
