"""Oracle of the cost model: FLOPs and bytes of a segment, from its modules on the meta device and on fake tensors.

Fake tensors have shape, dtype and device but no content, so model families, attention kernels, autocast and activation
checkpointing need no formulas of their own. The kernels are those of a CPU.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from thinpipe.config.model import ExecutionConfig, ModelConfig
from thinpipe.config.model_family import MAX_LOGITS, AttentionKernel, vocabulary_chunk
from thinpipe.config.precision import Recipe
from thinpipe.config.run import RunConfig
from thinpipe.device.precision import keep_casts
from thinpipe.models.boundary_projection import OrthonormalProjection
from thinpipe.models.decoder import Attention
from thinpipe.models.model import Segment, build
from thinpipe.optim import RowwiseAdamW
from thinpipe.pipeline.placement import in_flight_microbatches
from thinpipe.planning import segment_costs as cost_model
from thinpipe.planning.activations import SavedActivations
from thinpipe.planning.partition import SegmentNeeds
from thinpipe.subspace import Subspace
from thinpipe.subspace.factorized_embedding import FactorizedEmbedding
from thinpipe.subspace.parameter_tags import copy_mark


def check_costs(
    model: ModelConfig,
    config: RunConfig,
    indices: Sequence[int] | None = None,
    attention: AttentionKernel = "fused",
) -> None:
    """Asserts that the cost model says the same as the oracle, of all segments or of those with these indices."""
    built, costs = build(model), cost_model.segment_costs(model, config, attention)
    for module in built.modules():
        if isinstance(module, Attention):
            module.repeats_keys = attention == "fused-repeated" and module.widths[0] != module.widths[1]
    dtype = getattr(torch, config.planned_recipe.weights)
    for index in range(len(costs)) if indices is None else indices:
        cost, segment = costs[index], built.segments[index]
        numel = sum(parameter.numel() for parameter in segment.parameters())
        assert (cost.parameters, cost.weights_nbytes) == (numel, numel * dtype.itemsize), index
        assert cost.state_nbytes == state_nbytes(segment, config), index
        assert cost.gradients_nbytes == cost.weights_nbytes
        assert cost.tables_nbytes == _tables_numel(segment) * dtype.itemsize, index
        assert cost.flops_per_token == flops_per_token(segment, config), index
        sizes = {"batch": config.microbatch_size, "tokens": config.training.seq_len, "recipe": config.planned_recipe}
        sizes["sums_gradients"] = config.microbatches > 1
        with sdpa_kernel([SDPBackend.MATH] if attention == "math" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            saved = count_saved_activations(segment, config.execution, **sizes)  # type: ignore[arg-type]
        assert (cost.activation_nbytes, cost.peak_extra_nbytes) == (saved.nbytes, saved.peak_extra_nbytes), index
        assert cost.copies_nbytes == saved.copies_nbytes, index
    assert cost_model.shared_nbytes(model, config) == shared_nbytes(model, config)


def _tables_numel(segment: Segment) -> int:
    """Numbers in embeddings and in the matrices that project their rows up."""
    tables = [module for module in segment.modules() if isinstance(module, nn.Embedding | FactorizedEmbedding)]
    owned = {id(parameter): parameter.numel() for table in tables for parameter in table.parameters()}
    return sum(owned.values())


def segment_needs(model: ModelConfig, config: RunConfig, *, processes: int | None = None) -> list[SegmentNeeds]:
    """FLOPs and memory of every segment, in model order.

    `processes`: number of processes that share the segments; default: one per segment, which has the most micro-batches
    in flight. Excludes memory that the segments of one machine share: see `shared_nbytes`.
    """
    built, count = build(model), len(model.segments)
    return [
        SegmentNeeds(
            flops_per_token=flops_per_token(segment, config),
            memory_nbytes=_memory_nbytes(
                segment, config, in_flight_microbatches(index, count, processes or count, config)
            ),
        )
        for index, segment in enumerate(built.segments)
    ]


def shared_nbytes(model: ModelConfig, config: RunConfig) -> int:
    """Bytes needed once per machine, for any number of segments: fixed tables, basis and basis tracker sums."""
    built = build(model)
    held = sum(buffer.nbytes for _, buffer in built.named_buffers())  # a shared buffer is listed once
    if isinstance(built.space, Subspace):
        held += 3 * built.space.basis_DK.nbytes  # a second basis during an update, and the tracker sums
    return held * 2 if config.planned_recipe.weights == "float64" else held


def flops_per_token(segment: Segment, config: RunConfig) -> float:
    model, checkpointing = segment.config, config.execution.checkpoint_activations
    tokens = config.microbatch_size * config.training.seq_len
    attention = 2 * config.training.seq_len * model.n_heads * model.head_dim * len(segment.blocks)
    total = (6 if checkpointing == "none" else 8) * (_matrix_numbers(segment.blocks) + attention)
    for part in (segment.first, segment.projections, segment.last):
        recomputed = checkpointing == "segment" and part is not segment.last
        recomputed |= part is segment.last and _has_chunked_loss(segment, tokens)
        total += 0 if part is None else (8 if recomputed else 6) * _matrix_numbers(part)
    if model.subspace.width is not None:
        products, recomputed_products = _products_with_basis(segment, config)
        total += 4 * model.dim * model.subspace.width * products
        total += 2 * model.dim * model.subspace.width * recomputed_products if checkpointing == "segment" else 0
    return total


def _matrix_numbers(part: nn.Module) -> int:
    weights = [module.weight for module in part.modules() if isinstance(module, nn.Linear)]
    weights += [module.columns_DK for module in part.modules() if isinstance(module, OrthonormalProjection)]
    return sum(weight.numel() for weight in weights)


def _products_with_basis(segment: Segment, config: RunConfig) -> tuple[int, int]:
    """Number of products with the basis per token: reads of the stream, and one for the basis tracker. And how many
    reads stand before the head."""
    is_last = segment.last is not None
    tracked = int(is_last and config.basis.interval > 0)
    if not isinstance(segment.space, Subspace):
        return 1 + tracked, 1
    reads = 2 * len(segment.blocks)
    return reads + int(is_last) + tracked, reads


def _memory_nbytes(segment: Segment, config: RunConfig, microbatches: int) -> int:
    dtype: torch.dtype = getattr(torch, config.planned_recipe.weights)
    weights = sum(parameter.numel() for parameter in segment.parameters()) * dtype.itemsize
    saved = count_saved_activations(
        segment,
        config.execution,
        batch=config.microbatch_size,
        tokens=config.training.seq_len,
        recipe=config.planned_recipe,
        sums_gradients=config.microbatches > 1,
    )
    gradients, peak = weights, saved.peak_extra_nbytes
    if microbatches > 1:  # gradients of shared copies wait for the end of a backward pass
        peak = max(peak, saved.copies_nbytes - saved.nbytes)
    held = saved.copies_nbytes + microbatches * saved.nbytes + peak
    # With one micro-batch, gradients are allocated as activations are freed, so the two do not add up. With more,
    # gradients stay allocated while the next micro-batch runs.
    beside = gradients + held if config.microbatches > 1 else max(gradients, held)
    return state_nbytes(segment, config) + beside


def state_nbytes(segment: Segment, config: RunConfig) -> int:
    """Bytes of the weights, and of the moments that the optimiser makes for them on the meta device."""
    dtype: torch.dtype = getattr(torch, config.planned_recipe.weights)
    parameters = [(name, _like(parameter, dtype)) for name, parameter in segment.named_parameters()]
    optimizer = RowwiseAdamW(parameters, second_moment=config.optimizer.second_moment)
    [group] = optimizer.param_groups
    held = sum(parameter.nbytes for parameter in group["params"])
    for parameter in group["params"]:
        state = optimizer._start_state(parameter, group)
        held += sum(moment.nbytes for name, moment in state.items() if name != "step")
    return held


def _like(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, dtype=dtype))
    copy_mark(parameter, made)
    return made


def count_saved_activations(
    segment: Segment, execution: ExecutionConfig, *, batch: int, tokens: int, recipe: Recipe, sums_gradients: bool
) -> SavedActivations:
    """Activation memory of a segment that is on the meta device. The gradient of a table comes when the activations of
    its micro-batch are gone."""
    found = _activations(segment, execution, batch, tokens, recipe, sums_gradients=sums_gradients)
    modules = [module for module in segment.modules() if isinstance(module, nn.Embedding | FactorizedEmbedding)]
    tables = [parameter.numel() for module in modules for parameter in module.parameters()] if sums_gradients else []
    table = max(tables, default=0) * recipe.itemsize - found.nbytes
    return replace(found, peak_extra_nbytes=max(found.peak_extra_nbytes, table))


def _activations(
    segment: Segment, execution: ExecutionConfig, batch: int, tokens: int, recipe: Recipe, *, sums_gradients: bool
) -> SavedActivations:
    """Without the gradients of tables. The peak adds two gradients of the size of the largest saved tensor: the logits
    in the segment with the output head, else a tensor inside an MLP; or one of that size and that of the head, if it is
    added to a sum over micro-batches (`sums_gradients`) or comes in bfloat16 first. With activation checkpointing that
    of one recomputed block, or by segment of all that is recomputed, once head and loss are done with.
    """
    head = None if _has_chunked_loss(segment, batch * tokens) else segment.last

    def temporary(saved: list[int]) -> int:
        """Of the head and what it has saved."""
        modules = [] if head is None else [*head.modules()]
        matrix = max((module.weight.numel() for module in modules if isinstance(module, nn.Linear)), default=0)
        summed = matrix * recipe.itemsize if sums_gradients else 0
        first = 2 * matrix if recipe.autocast_bf16 else summed
        largest = max((Counter(saved) - Counter([2 * matrix] if recipe.autocast_bf16 else [])).elements())
        return max(largest + max(largest, first), first + summed - sum(saved) if recipe.autocast_bf16 else 0)

    plain = replace(execution, compile=False, checkpoint_activations="none")
    before_head, after_head, copies = _saved_nbytes(segment, plain, batch, tokens, recipe)
    everything, loss = before_head + after_head, _peak_of_chunked_loss(segment, batch * tokens, recipe)
    inside = 2 * max((Counter(everything) - Counter(copies)).elements())
    if execution.checkpoint_activations == "none":
        return SavedActivations(
            nbytes=sum(everything) - sum(copies),
            peak_extra_nbytes=max(inside, temporary(after_head), loss),
            copies_nbytes=sum(copies),
        )
    inputs, output, copies = _saved_nbytes(segment, replace(execution, compile=False), batch, tokens, recipe)
    outside, freed = sum(inputs) + sum(output), 0 if segment.last is None else sum(output)
    assert not copies, "what is computed again would be kept"
    if execution.checkpoint_activations == "segment":
        recomputed = list((Counter(everything) - Counter(inputs[:1]) - Counter(output)).elements())
        peak = max(temporary(output), sum(recomputed) + 2 * max(recomputed) - freed)
        return SavedActivations(nbytes=outside, peak_extra_nbytes=max(peak, loss))
    one_block = (sum(everything) - outside) // len(segment.blocks)
    # Block inputs are counted in `outside`, except for the base of a subspace stream.
    base = batch * tokens * segment.config.dim * recipe.itemsize if isinstance(segment.space, Subspace) else 0
    recomputed_block = max(0, one_block) + 2 * max(before_head)
    peak = max(temporary(output), recomputed_block - freed)
    return SavedActivations(nbytes=outside + base, peak_extra_nbytes=max(peak, loss))


def _has_chunked_loss(segment: Segment, tokens: int) -> bool:
    return segment.last is not None and tokens * segment.config.vocab_size > MAX_LOGITS


def _peak_of_chunked_loss(segment: Segment, tokens: int, recipe: Recipe) -> int:
    """Of the backward pass: logits, their gradient in bfloat16, gradients of states in float32 and in the precision of
    products, and of the head. `tests/train/test_costs.py` compares with a process."""
    if not _has_chunked_loss(segment, tokens):
        return 0
    weights = getattr(torch, recipe.weights)
    product = torch.bfloat16 if recipe.autocast_bf16 else weights
    wide = torch.promote_types(product, torch.float32)
    model, rows = segment.config, vocabulary_chunk(tokens, segment.config.vocab_size)
    logits = tokens * rows * (wide.itemsize + (product.itemsize if product != wide else 0))
    gradients = (tokens + model.dim) * rows * product.itemsize
    states = tokens * model.dim * (wide.itemsize + product.itemsize)
    return states + model.vocab_size * model.dim * weights.itemsize + max(logits, gradients)


def _saved_nbytes(
    segment: Segment, execution: ExecutionConfig, batch: int, tokens: int, recipe: Recipe
) -> tuple[list[int], list[int], list[int]]:
    """Bytes of every storage that autograd saves, without parameters and buffers; views of one storage count once.
    Before, and in or after, head and loss or the message to the next segment; and those that the next micro-batch saves
    too."""
    before, dtype = (segment.execution, segment.autocast_bf16), getattr(torch, recipe.weights)
    segment.execution, segment.autocast_bf16 = execution, recipe.autocast_bf16
    saved: dict[int, Tensor] = {}
    saved_again: set[int] = set()
    before_head: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def note(tensor: Tensor) -> None:
        saved_again.add(tensor.untyped_storage()._cdata)

    heads = [] if segment.last is None else [segment.last]
    hooks = [head.register_forward_pre_hook(lambda *_: before_head.extend(saved)) for head in heads]
    try:
        with FakeTensorMode():
            own = _fake_tensors(segment, dtype)

            def run_microbatch() -> Tensor:
                ids_BW = torch.zeros(batch, tokens + 1, dtype=torch.int64)
                received = torch.zeros(batch, tokens, segment.config.state_width, dtype=dtype, requires_grad=True)
                state = received if segment.first is None else None
                options = {"dropout_seed": 0, "targets_BT": ids_BW[:, 1:]}
                out: Tensor = functional_call(segment, own, (ids_BW[:, :-1], state), options)
                return out if segment.last is None else out.mean()

            with keep_casts():
                with saved_tensors_hooks(save, lambda tensor: tensor):
                    out = run_microbatch()
                for hook in hooks:
                    hook.remove()
                with saved_tensors_hooks(
                    lambda tensor: saved_again.add(tensor.untyped_storage()._cdata), lambda tensor: tensor
                ):
                    run_microbatch()
            if segment.last is None:
                saved.pop(out.untyped_storage()._cdata, None)
                before_head.extend(saved)
                save(out)  # the output state: it is sent, and held until the backward pass starts from it
            own_storages = {tensor.untyped_storage()._cdata for tensor in own.values()}
            sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in own_storages}
            return (
                [nbytes for key, nbytes in sizes.items() if key in before_head],
                [nbytes for key, nbytes in sizes.items() if key not in before_head],
                [nbytes for key, nbytes in sizes.items() if key in saved_again],
            )
    finally:
        segment.execution, segment.autocast_bf16 = before
        for hook in hooks:
            hook.remove()


def _fake_tensors(segment: Segment, dtype: torch.dtype) -> dict[str, Tensor]:
    """Fake parameters and buffers with the dtypes that `materialise` would give them."""
    own: dict[str, Tensor] = {
        name: torch.empty(parameter.shape, dtype=dtype, requires_grad=True)
        for name, parameter in segment.named_parameters()
    }
    for name, buffer in segment.named_buffers():
        wider = buffer.is_floating_point() and dtype == torch.float64
        own[name] = torch.empty(buffer.shape, dtype=dtype if wider else buffer.dtype)
    return own
