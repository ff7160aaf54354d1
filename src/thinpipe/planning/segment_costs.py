"""Cost model of training: FLOPs and memory of every segment, from the shapes of its parameters. Imports no torch.

FLOPs per token, forward and backward, for sequence length S, model width D and subspace width K:

    6 x matrix elements       including the output head, without embeddings (lookups)
  + 12 x S x D per block      attention, without the mask: kernels that skip masked parts run at a lower rate
  + 4 x D x K per read        of a subspace stream, base + state Uᵀ (U has no gradient): two per block and one in
                              `last`; one per segment where the stream is dense inside segments; one more read where
                              the basis tracker runs
    8 and 16 for 6 and 12     in blocks with activation checkpointing (execution.checkpoint_activations); by segment
                              also 8 and 6 for 6 and 4 in every other matrix but the head, and in every read before it
    8 for 6                   in the head, where the logits are too many to exist at once (`models/token_losses.py`)

Memory: weights, gradients and optimizer moments; saved activations of a micro-batch (`planning/activations.py`) times
the number of micro-batches in flight; under autocast, bfloat16 copies of matrices; and temporary tensors of a running
segment. Bytes of tensors only: Python, torch and its libraries come on top.

Checked against torch's fake tensors, to the byte and operation, in `tests/plan/test_segment_costs.py`, and against real
steps in `tests/train/test_costs.py`: for 15 whole models on a CPU (Llama and GPT-2, dense and subspace, three sizes of
150 to 460 MB; bfloat16, activation checkpointing, cut into segments) predicted memory is 0.95 to 1.05 of the measured;
FLOPs are within 2 % of torch's own count, within 10 % with activation checkpointing. Not measured on a GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from thinpipe.config.model import ModelConfig
from thinpipe.config.model_family import AttentionKernel, vocabulary_chunk
from thinpipe.config.offload import streamed_nbytes
from thinpipe.config.parameter_shapes import ParameterGroup, SegmentShapes, segment_shapes
from thinpipe.config.precision import AUTO_RECIPES, Precision
from thinpipe.config.run import RunConfig
from thinpipe.pipeline.placement import in_flight_microbatches
from thinpipe.planning.activations import count_saved_activations, masters_on_host
from thinpipe.planning.partition import SegmentNeeds
from thinpipe.planning.segment_cost import SegmentCost
from thinpipe.planning.stored_costs import stored_segment_costs
from thinpipe.planning.stored_model import PlannedModel, StoredModel


def segment_costs(model: PlannedModel, config: RunConfig, attention: AttentionKernel = "fused") -> list[SegmentCost]:
    """Costs of every segment, in model order, without what the segments of a machine share (`shared_nbytes`).

    `attention`: the kernel of the machine. With `training.precision` auto, which depends on the device, the larger
    figures of the recipes that it may choose.
    """
    if config.training.precision == "auto":
        choices = [segment_costs(model, with_precision(config, recipe), attention) for recipe in AUTO_RECIPES]
        return [_larger(costs) for costs in zip(*choices, strict=True)]
    if isinstance(model, StoredModel):
        return stored_segment_costs(model, config)
    return [_cost(model, config, index, shapes, attention) for index, shapes in enumerate(segment_shapes(model))]


def segment_needs(
    costs: Sequence[SegmentCost], config: RunConfig, *, processes: int | None = None
) -> list[SegmentNeeds]:
    """Needs of every segment on which the partition over machines is based.

    `processes`: number of processes that share the segments; default: one per segment, which has the most micro-batches
    in flight.
    """
    count = len(costs)
    return [
        SegmentNeeds(
            flops_per_token=cost.flops_per_token,
            memory_nbytes=memory_nbytes(cost, config, in_flight_microbatches(index, count, processes or count, config)),
            host_nbytes=cost.host_nbytes,
        )
        for index, cost in enumerate(costs)
    ]


def needs_by_kernel(model: PlannedModel, config: RunConfig) -> list[SegmentNeeds]:
    """Needs of every segment on machines that may have different kernels of attention."""
    kernels: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
    by_kernel = {kernel: segment_needs(segment_costs(model, config, kernel), config) for kernel in kernels}
    return [
        replace(needs, attention_nbytes={kernel: by_kernel[kernel][index].memory_nbytes for kernel in kernels})
        for index, needs in enumerate(by_kernel["fused"])
    ]


def memory_nbytes(cost: SegmentCost, config: RunConfig, n_microbatches: int) -> int:
    """Peak bytes of a segment with `n_microbatches` in flight, on a device with memory of its own. Gradients replace
    activations as the backward pass goes, but with several micro-batches they stay while the next one needs its
    activations; the update comes when activations are gone."""
    held = cost.copies_nbytes + n_microbatches * cost.activation_nbytes + peak_extra_nbytes([cost], n_microbatches)
    backward = cost.gradients_nbytes + held if config.microbatches > 1 else max(cost.gradients_nbytes, held)
    state = cost.device_weights_nbytes + cost.frozen_nbytes + cost.optimiser_nbytes - cost.offloaded_nbytes
    return state + max(backward, cost.gradients_nbytes + update_nbytes([cost]))


def peak_extra_nbytes(costs: Sequence[SegmentCost], n_microbatches: int) -> int:
    """Additional bytes while one of these segments computes. Where micro-batches in flight share copies of weights, the
    copies' gradients, as large as they, are cast and freed at the end of a backward pass, when its activations are
    gone."""
    computing = max(cost.peak_extra_nbytes for cost in costs)
    if n_microbatches == 1:
        return computing
    return max(computing, sum(cost.copies_nbytes - cost.activation_nbytes for cost in costs))


def update_nbytes(costs: Sequence[SegmentCost]) -> int:
    """Bytes that a device with memory of its own needs while it updates the parameters of these segments."""
    streamed = [state for cost in costs for state in cost.streamed]
    return max(cost.slices_nbytes for cost in costs) + streamed_nbytes(streamed)


def shared_nbytes(model: PlannedModel, config: RunConfig) -> int:
    """Bytes that a machine holds once for all its segments: frozen tables, and the basis with its tracker's sums."""
    if isinstance(model, StoredModel):
        return 0
    held = 0
    if model.spec.rotary is not None:
        held += 2 * model.max_seq_len * model.head_dim * 4  # cosines and sines
    if model.subspace.width is not None:
        rows = [model.vocab_size, model.max_seq_len] if model.has_position_table else [model.vocab_size]
        held += sum(_frozen_table_nbytes(model, count) for count in rows)
        held += 4 * model.dim * model.subspace.width * 4  # a new basis beside the old one, and the tracker's two sums
    return held * 2 if config.planned_recipe.weights == "float64" else held


def _frozen_table_nbytes(model: ModelConfig, rows: int) -> int:
    if model.subspace.fixed == "signs":
        return rows * -(-model.dim // 8) + 256 * 8  # packed bits, and the 8 signs of every byte value
    return rows * model.dim * 4


def with_precision(config: RunConfig, precision: Precision) -> RunConfig:
    return replace(config, training=replace(config.training, precision=precision))


def without_offload(config: RunConfig) -> RunConfig:
    """Settings as a device has them that computes in the host's memory."""
    return replace(config, training=replace(config.training, offload="none"))


def _larger(costs: Sequence[SegmentCost]) -> SegmentCost:
    """The first, with the largest activations of all, and as much more as any needs for its copies of weights with one
    micro-batch in flight. With more in flight, what activations differ by outweighs the copies sooner."""
    saved, extra = (max(getattr(cost, part) for cost in costs) for part in ("activation_nbytes", "peak_extra_nbytes"))
    free = [saved - cost.activation_nbytes + extra - cost.peak_extra_nbytes for cost in costs]
    copies = max(max(0, cost.copies_nbytes - room) for cost, room in zip(costs, free, strict=True))
    return replace(costs[0], activation_nbytes=saved, peak_extra_nbytes=extra, copies_nbytes=copies)


def _cost(
    model: ModelConfig, config: RunConfig, index: int, shapes: SegmentShapes, attention: AttentionKernel
) -> SegmentCost:
    recipe, rule = config.planned_recipe, config.optimizer.second_moment
    numel, itemsize = sum(each.numel for each in shapes.unique_parameters), recipe.itemsize
    moments = [recipe.moments_nbytes(each.shape, each.second_moment_numel(rule)) for each in shapes.unique_parameters]
    is_offloaded = config.training.offload == "optimizer"
    masters = [itemsize * each.numel for each in masters_on_host(config, shapes.block)] * len(shapes.blocks)
    forward, backward = _flops_per_token(model, config, index, shapes)
    saved = count_saved_activations(model, config, index, shapes, attention)
    return SegmentCost(
        parameters=numel,
        forward_flops_per_token=forward,
        backward_flops_per_token=backward,
        weights_nbytes=numel * itemsize,
        gradients_nbytes=numel * itemsize,
        optimiser_nbytes=sum(moments),
        offloaded_nbytes=sum(moments) if is_offloaded else 0,
        masters_nbytes=sum(masters),
        slices_nbytes=recipe.update_nbytes(each.shape for each in shapes.unique_parameters),
        streamed=_streamed(config, shapes, moments) if is_offloaded else (),
        activation_nbytes=saved.nbytes,
        peak_extra_nbytes=saved.peak_extra_nbytes,
        copies_nbytes=saved.copies_nbytes,
        tables_nbytes=itemsize * sum(each.numel for each in shapes.unique_parameters if each.is_table),
    )


def _streamed(config: RunConfig, shapes: SegmentShapes, moments: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rows, and bytes of a row, of each parameter's offloaded state; `moments`: bytes of each parameter's."""
    masters, itemsize = masters_on_host(config, shapes.block), config.planned_recipe.itemsize
    state = [
        nbytes + (itemsize * each.numel if each in masters else 0)
        for each, nbytes in zip(shapes.unique_parameters, moments, strict=True)
    ]
    rows = [each.shape[0] for each in shapes.unique_parameters]
    return tuple((count, nbytes // count) for count, nbytes in zip(rows, state, strict=True))


def _flops_per_token(model: ModelConfig, config: RunConfig, index: int, shapes: SegmentShapes) -> tuple[float, float]:
    attention = 2 * config.training.seq_len * model.dim * len(shapes.blocks)
    blocks = 2 * (_matmul_numel(shapes.block) * len(shapes.blocks) + attention)
    ends, head = 2 * _matmul_numel(shapes.ends), 2 * _matmul_numel(shapes.last)
    one_read = 2 * model.dim * (model.subspace.width or 0)
    reads, last_reads = _reads_of_basis(model, index, shapes)
    tracked = 2 * one_read if shapes.last and config.basis.interval > 0 else 0
    checkpointed = {"none": 0, "block": blocks, "segment": blocks + ends - head + (reads - last_reads) * one_read}
    recomputed = checkpointed[config.execution.checkpoint_activations]
    tokens = config.microbatch_size * config.training.seq_len
    if vocabulary_chunk(tokens, model.vocab_size) < model.vocab_size:
        recomputed += head
    forward = blocks + ends + reads * one_read
    return float(forward), float(2 * (blocks + ends) + reads * one_read + recomputed + tracked)


def _matmul_numel(group: ParameterGroup) -> int:
    return sum(each.numel for each in group if each.is_matmul)


def _reads_of_basis(model: ModelConfig, index: int, shapes: SegmentShapes) -> tuple[int, int]:
    """How often the stream is reconstructed, base + state Uᵀ, in a pass: altogether, and by the head alone."""
    if model.subspace.width is None:
        return 0, 0
    if model.segments[index].start >= model.first_free_block:
        return 1, 0
    by_last = int(bool(shapes.last))
    return 2 * len(shapes.blocks) + by_last, by_last
