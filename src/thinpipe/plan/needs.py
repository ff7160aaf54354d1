"""What every segment of a run needs, by the law of `train/costs.py` and with shapes by arithmetic: no torch.

Bytes are those of tensors: Python, torch and its libraries come on top.
"""

from dataclasses import dataclass

from thinpipe.models.config import LlamaConfig, ModelConfig
from thinpipe.plan.activations import ITEMSIZES, count_kept
from thinpipe.plan.parameters import Part, SegmentParts, segment_parts
from thinpipe.train.config import RunConfig
from thinpipe.train.under_way import under_way

__all__ = ["SegmentNeed", "memory_nbytes", "segment_needs", "shared_nbytes", "under_way"]


@dataclass(frozen=True, kw_only=True)
class SegmentNeed:
    parameters: int
    """Trainable numbers."""
    forward_flops_per_token: float
    backward_flops_per_token: float
    """With what is computed again of checkpointed blocks."""
    weights_nbytes: int
    gradients_nbytes: int
    optimiser_nbytes: int
    kept_nbytes: int
    """Activations of one micro-batch, from its forward to its backward pass."""
    at_work_nbytes: int
    """More, for as long as the segment computes."""
    tables_nbytes: int
    """Of the weights: tables that are looked up by tokens, pairs or positions, and what widens their rows."""


def segment_needs(model: ModelConfig, config: RunConfig) -> list[SegmentNeed]:
    """In order. What all segments of a machine share is not here: see `shared_nbytes`."""
    return [_need(model, config, index, parts) for index, parts in enumerate(segment_parts(model))]


def memory_nbytes(need: SegmentNeed, config: RunConfig, under_way: int) -> int:
    """With so many micro-batches under way. Gradients come as activations go, and stay for the next micro-batch."""
    held = under_way * need.kept_nbytes + need.at_work_nbytes
    beside = need.gradients_nbytes + held if config.microbatches > 1 else max(need.gradients_nbytes, held)
    return need.weights_nbytes + need.optimiser_nbytes + beside


def shared_nbytes(model: ModelConfig, config: RunConfig) -> int:
    """What a machine has once, however many segments it has: frozen tables and the basis, with its tracker's sums."""
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
        return rows * -(-model.dim // 8) + 256 * 8  # bits, and the signs of every byte
    return rows * model.dim * 4


def _need(model: ModelConfig, config: RunConfig, index: int, parts: SegmentParts) -> SegmentNeed:
    itemsize = ITEMSIZES[config.training.dtype]
    numbers = sum(each.numbers for each in parts.own)
    squares = sum(each.second_moment(config.optimizer.second_moment) for each in parts.own)
    forward, backward = _flops_per_token(model, config, index, parts)
    kept = count_kept(model, config, index, parts)
    return SegmentNeed(
        parameters=numbers,
        forward_flops_per_token=forward,
        backward_flops_per_token=backward,
        weights_nbytes=numbers * itemsize,
        gradients_nbytes=numbers * itemsize,
        optimiser_nbytes=(numbers + squares) * itemsize,
        kept_nbytes=kept.nbytes,
        at_work_nbytes=kept.at_work_nbytes,
        tables_nbytes=itemsize * sum(each.numbers for each in parts.own if each.is_table),
    )


def _flops_per_token(model: ModelConfig, config: RunConfig, index: int, parts: SegmentParts) -> tuple[float, float]:
    attention = 2 * config.training.seq_len * model.dim * parts.blocks
    blocks = 2 * (_product_numbers(parts.block) * parts.blocks + attention)
    ends = 2 * _product_numbers(parts.ends)
    reads, tracked = _reads_of_basis(model, index, parts), 0
    if model.subspace.width is not None and parts.last and config.basis.interval > 0:
        tracked = 4 * model.dim * model.subspace.width
    again = blocks if config.execution.checkpoint_activations else 0
    return float(blocks + ends + reads), float(2 * (blocks + ends) + reads + again + tracked)


def _product_numbers(part: Part) -> int:
    return sum(each.numbers for each in part if each.multiplies)


def _reads_of_basis(model: ModelConfig, index: int, parts: SegmentParts) -> int:
    """Operations of base + state Uᵀ, as many forward as backward."""
    if model.subspace.width is None:
        return 0
    confined = model.segments[index].start < model.first_free_block
    reads = 2 * parts.blocks + int(bool(parts.last)) if confined else 1
    return 2 * model.dim * model.subspace.width * reads
