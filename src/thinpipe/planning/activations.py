"""Activation memory of a segment by arithmetic: the tensors that autograd saves for the backward pass.

`tests/plan/test_segment_costs.py` compares it with what `tests/plan/fake_tensor_oracle.py` counts on torch's fake
tensors, for CPU kernels; GPU kernels save about as much. Lists hold the bytes of each saved tensor; a tensor that two
operations save is counted once.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from thinpipe.config.model import ModelConfig
from thinpipe.config.model_family import (
    MAX_FLOAT32_ATTENTION_TOKENS,
    AttentionKernel,
    MLPKind,
    NormKind,
    vocabulary_chunk,
)
from thinpipe.config.offload import keeps_masters
from thinpipe.config.parameter_shapes import ParameterGroup, SegmentShapes, attention_widths
from thinpipe.config.run import RunConfig
from thinpipe.core.units import BF16_NBYTES, ITEM_NBYTES

_ID_NBYTES, _MASK_NBYTES = 8, 1
_MLP_TENSORS: dict[MLPKind, int] = {"swiglu": 4, "gelu_tanh": 2}
"""Tensors of hidden width that an MLP saves. swiglu: gate, silu(gate), up, and their product. gelu_tanh: the input and
the output of GELU."""


@dataclass(frozen=True, kw_only=True)
class SavedActivations:
    """Activations of one micro-batch in one segment."""

    nbytes: int
    """Bytes held from the forward to the backward pass."""
    peak_extra_nbytes: int
    """Additional bytes while the segment computes."""
    copies_nbytes: int = 0
    """bfloat16 copies of weights, which all micro-batches in flight share (`device.precision.keep_casts`)."""


def count_saved_activations(
    model: ModelConfig, config: RunConfig, index: int, shapes: SegmentShapes, attention: AttentionKernel = "fused"
) -> SavedActivations:
    """Activations of segment `index`, which has these parameters, on a device with this kernel."""
    in_subspace = model.segments[index].start < model.first_free_block
    run = _SegmentPass(model=model, config=config, in_subspace=in_subspace, attention=attention)
    ids = [run.ids] if _looks_up_ids(run, shapes) else []
    ends = _before_blocks(run, shapes) + _down_projection(run, shapes)
    blocks = _block(run, shapes.block) * len(shapes.blocks)
    basis = run.basis_copy if run.in_subspace or index else []
    match config.execution.checkpoint_activations:
        case "none":
            everything = ids + ends + blocks + basis + _output(run, shapes, ids)
            copies, output = _copies(run, shapes), _output(run, shapes, ids)
            inside = 2 * max((Counter(everything) - Counter(copies)).elements())
            saved = SavedActivations(
                nbytes=sum(everything) - sum(copies),
                peak_extra_nbytes=max(inside, run.temporary(output, run.plain_head(shapes))),
                copies_nbytes=sum(copies),
            )
        case "block":
            saved = _with_checkpointed_blocks(run, shapes, ids + ends, blocks, basis, _output(run, shapes, ids))
        case "segment":
            saved = _with_checkpointed_segment(run, shapes, ends + blocks, basis)
    table = _gradient_of_table(run, shapes) - saved.nbytes  # the micro-batch's activations are gone by then
    peaks = saved.peak_extra_nbytes, _peak_of_chunked_loss(run, shapes), table
    return replace(saved, peak_extra_nbytes=max(peaks))


def masters_on_host(config: RunConfig, block: ParameterGroup) -> ParameterGroup:
    """Parameters of a block whose float32 numbers are in the host's memory (`optim/master_weights.py`)."""
    schedule = config.parallelism.pipeline_parallel_schedule
    if not keeps_masters(config.training.offload, config.planned_recipe, schedule):
        return ()
    return tuple(each for each in block if each.is_matmul and each.coordinates_axis is None)


@dataclass(frozen=True, kw_only=True)
class _SegmentPass:
    """Sizes for one micro-batch in one segment."""

    model: ModelConfig
    config: RunConfig
    in_subspace: bool
    attention: AttentionKernel

    @property
    def itemsize(self) -> int:
        """Bytes per element of weights and of the residual stream."""
        return self.config.planned_recipe.itemsize

    @property
    def uses_autocast(self) -> bool:
        """Under autocast the factors of matrix products are copied to bfloat16."""
        return self.config.planned_recipe.autocast_bf16

    @property
    def matmul_itemsize(self) -> int:
        """Bytes per element of the result of a matrix product."""
        return BF16_NBYTES if self.uses_autocast else self.itemsize

    @property
    def float32_itemsize(self) -> int:
        """Bytes per element where at least float32 is used."""
        return max(ITEM_NBYTES["float32"], self.itemsize)

    @property
    def dropout(self) -> bool:
        return bool(self.model.spec.dropout(self.model))

    @property
    def tokens(self) -> int:
        return self.config.microbatch_size * self.config.training.seq_len

    def each(self, numel: int, itemsize: int) -> int:
        """Bytes of `numel` elements per token of the micro-batch."""
        return self.tokens * numel * itemsize

    def copies(self, group: ParameterGroup) -> list[int]:
        """Bytes of the bfloat16 copies that autocast makes of matrices."""
        return [BF16_NBYTES * each.numel for each in group if each.is_matmul] if self.uses_autocast else []

    def block_copies(self, group: ParameterGroup) -> list[int]:
        """As `copies`, for the parameters of a block, some of which may be bfloat16 copies of masters already."""
        masters = masters_on_host(self.config, group)
        return self.copies(tuple(each for each in group if each not in masters))

    def temporary(self, saved: list[int], head: ParameterGroup) -> int:
        """Additional bytes during the backward pass of what has saved these tensors, `head` being its output head: two
        gradients, both of the size of the largest tensor or one of the head's. The gradient of the head exists beside
        its sum over micro-batches; under autocast it comes in bfloat16, and in float32 when `saved` is gone. Gradients
        of matrices in blocks are smaller than those of activations, or not much larger."""
        matrix = max((each.numel for each in head if each.is_matmul), default=0)
        summed = matrix * self.itemsize if self.config.microbatches > 1 else 0
        first = matrix * BF16_NBYTES if self.uses_autocast else summed
        largest = max((Counter(saved) - Counter(self.copies(head))).elements())
        cast = first + summed - sum(saved) if self.uses_autocast else 0
        return max(largest + max(largest, first), cast)

    def plain_head(self, shapes: SegmentShapes) -> ParameterGroup:
        """Parameters of the head, unless the loss is computed in chunks, whose memory is counted by itself."""
        return () if self.has_chunked_loss else shapes.last

    @property
    def has_chunked_loss(self) -> bool:
        """True if the logits of the micro-batch are too many to exist at once."""
        return vocabulary_chunk(self.tokens, self.model.vocab_size) < self.model.vocab_size

    @property
    def ids(self) -> int:
        """Bytes of the token ids of the micro-batch, labels included."""
        return self.config.microbatch_size * (self.config.training.seq_len + 1) * _ID_NBYTES

    @property
    def basis_copy(self) -> list[int]:
        """Bytes of the basis cast to bfloat16, if the stream is: the basis itself is at least float32."""
        width = self.model.subspace.width
        if width is None or self.itemsize != BF16_NBYTES:
            return []
        return [self.model.dim * width * BF16_NBYTES]


def _with_checkpointed_blocks(
    run: _SegmentPass,
    shapes: SegmentShapes,
    before: list[int],
    blocks: list[int],
    basis: list[int],
    output: list[int],
) -> SavedActivations:
    """Keeps the input of each block, and recomputes one block at a time, after head and loss are done with. `before`,
    `output`: saved before and after the blocks."""
    model, everything = run.model, before + blocks + basis + output
    entering = run.each(model.subspace.width or model.dim if run.in_subspace else model.dim, run.itemsize)
    outside = sum(before) + sum(output) + len(shapes.blocks) * entering
    if shapes.last or not run.in_subspace:
        outside += sum(basis)  # the stream is reconstructed outside of checkpointed blocks
    one_block = (sum(everything) - outside) // len(shapes.blocks)
    base = run.each(model.dim, run.itemsize) if run.in_subspace else 0
    by_last = basis if run.in_subspace else []  # the head reads the basis, outside of the blocks
    freed = sum(output + by_last) if shapes.last else 0
    recomputed = max(0, one_block) + 2 * max(before + blocks + basis)
    peak = max(run.temporary(output, run.plain_head(shapes)), recomputed - freed)
    return SavedActivations(nbytes=outside + base, peak_extra_nbytes=peak)


def _with_checkpointed_segment(
    run: _SegmentPass, shapes: SegmentShapes, recomputed: list[int], basis: list[int]
) -> SavedActivations:
    """Keeps the token ids and the state that the segment received, and recomputes all but head and loss at once, after
    these are done with."""
    inputs, output = [run.ids], _output(run, shapes, [run.ids])
    inputs += [] if shapes.first else [run.each(run.model.state_width, run.itemsize)]
    last_reads_basis = bool(shapes.last) and run.in_subspace
    output, recomputed = (output + basis, recomputed) if last_reads_basis else (output, recomputed + basis)
    freed = sum(output) if shapes.last else 0
    peak = max(run.temporary(output, run.plain_head(shapes)), sum(recomputed) + 2 * max(recomputed) - freed)
    return SavedActivations(nbytes=sum(inputs) + sum(output), peak_extra_nbytes=peak)


def _copies(run: _SegmentPass, shapes: SegmentShapes) -> list[int]:
    """Bytes of the bfloat16 copies of all matrices that products under autocast read."""
    is_bottleneck = run.model.projection.kind == "bottleneck"
    ends = shapes.first + shapes.token_prior + (shapes.down_projection if is_bottleneck else ())
    return run.copies(ends + run.plain_head(shapes)) + run.block_copies(shapes.block) * len(shapes.blocks)


def _looks_up_ids(run: _SegmentPass, shapes: SegmentShapes) -> bool:
    """True if a table of the segment is looked up by token, which saves the token ids."""
    return bool(shapes.first) or (bool(shapes.token_prior) and run.model.projection.token_prior_rank > 0)


def _before_blocks(run: _SegmentPass, shapes: SegmentShapes) -> list[int]:
    """Embedding, token prior and up projection, without the token ids."""
    model, projection, saved = run.model, run.model.projection, []
    if model.has_position_table and shapes.first:
        saved.append(run.config.training.seq_len * _ID_NBYTES)
    if shapes.first:
        width = projection.embedding_rank or model.subspace.width or model.dim
        saved += [run.each(width, run.matmul_itemsize)] if projection.embedding_rank else []
        saved += [run.each(width, _MASK_NBYTES)] if run.dropout else []
    if shapes.token_prior and projection.token_prior_rank:
        saved.append(run.each(projection.token_prior_rank * projection.token_prior_window, run.matmul_itemsize))
    if shapes.token_prior and projection.bigram_rows:
        saved += [run.each(1, _ID_NBYTES), run.each(projection.bigram_rank, run.matmul_itemsize)]
    saved += run.copies(shapes.first + shapes.token_prior)
    if shapes.up_projection:
        saved.append(run.each(model.state_width, run.itemsize))
        saved += _inside_projection(run, run.itemsize)
    return saved


def _inside_projection(run: _SegmentPass, itemsize: int) -> list[int]:
    """Hidden activations of a bottleneck's MLP, before and after its nonlinearity."""
    if run.model.projection.kind != "bottleneck":
        return []
    return [run.each(run.model.projection.hidden or 2 * run.model.state_width, itemsize)] * 2


def _down_projection(run: _SegmentPass, shapes: SegmentShapes) -> list[int]:
    if not shapes.down_projection:
        return []
    is_bottleneck = run.model.projection.kind == "bottleneck"
    saved = [run.each(run.model.dim, run.matmul_itemsize if is_bottleneck else run.itemsize)]
    saved += _inside_projection(run, run.matmul_itemsize)
    return saved + (run.copies(shapes.down_projection) if is_bottleneck else [])


def _output(run: _SegmentPass, shapes: SegmentShapes, ids: list[int]) -> list[int]:
    """The message to the next segment; of the last segment: norm, head and loss. `ids`: empty unless the token ids are
    saved already, of which the labels of a single sample are a view."""
    model = run.model
    if not shapes.last:
        return [run.each(model.state_width, run.itemsize)]
    labels = [run.each(1, _ID_NBYTES)]
    if run.config.microbatch_size == 1:
        labels = [] if ids else [run.ids]
    saved = [*_norm(run), run.each(model.dim, run.matmul_itemsize), *labels]
    if run.has_chunked_loss:  # the largest logit and the sum of exponentials of each token
        return [*saved, run.each(1, run.float32_itemsize), run.each(1, run.float32_itemsize)]
    # the logits, and the summed loss
    return [*saved, *run.copies(shapes.last), run.each(model.vocab_size, run.float32_itemsize), run.float32_itemsize]


def _peak_of_chunked_loss(run: _SegmentPass, shapes: SegmentShapes) -> int:
    """Bytes while the backward pass of `models.token_losses` computes: the gradients of the states, summed and of a
    chunk, and of the head; and for a chunk the logits, which bfloat16 copies, or their gradient and the head's."""
    if not shapes.last or not run.has_chunked_loss:
        return 0
    model, rows = run.model, vocabulary_chunk(run.tokens, run.model.vocab_size)
    copied = run.matmul_itemsize if run.matmul_itemsize != run.float32_itemsize else 0
    logits = run.each(rows, run.float32_itemsize + copied)
    gradients = run.each(rows, run.matmul_itemsize) + rows * model.dim * run.matmul_itemsize
    states = run.each(model.dim, run.float32_itemsize + run.matmul_itemsize)
    return states + model.vocab_size * model.dim * run.itemsize + max(logits, gradients)


def _gradient_of_table(run: _SegmentPass, shapes: SegmentShapes) -> int:
    """Bytes of the gradient of the largest table, as large as the table, beside its sum over micro-batches."""
    if run.config.microbatches == 1:
        return 0
    tables = [each.numel for each in shapes.first + shapes.token_prior if each.is_table]
    return max(tables, default=0) * run.itemsize


def _rms_norm(run: _SegmentPass) -> list[int]:
    """Input, statistic, and the normalised values before scaling."""
    wide = run.each(run.model.dim, run.float32_itemsize)
    return [wide, run.each(1, run.float32_itemsize), wide]


def _layer_norm(run: _SegmentPass) -> list[int]:
    """Input, mean and standard deviation."""
    return [run.each(run.model.dim, run.itemsize), run.each(1, run.itemsize), run.each(1, run.itemsize)]


_NORMS: dict[NormKind, Callable[[_SegmentPass], list[int]]] = {"rms": _rms_norm, "layer": _layer_norm}


def _norm(run: _SegmentPass) -> list[int]:
    return _NORMS[run.model.spec.norm](run)


def _block(run: _SegmentPass, group: ParameterGroup) -> list[int]:
    model, attention, mlp = run.model, run.model.spec.attention, run.model.spec.mlp
    saved = _norm(run) * 2 + _attention(run)
    for readers in (attention.readers, mlp.readers):  # under autocast each matrix saves its own copy of its input
        saved += [run.each(model.dim, run.matmul_itemsize)] * (len(readers) if run.uses_autocast else 1)
    saved += [run.each(mlp.hidden_dim(model), run.matmul_itemsize)] * _MLP_TENSORS[mlp.kind] + run.block_copies(group)
    if model.spec.rotary is not None and run.matmul_itemsize == BF16_NBYTES:
        # cosines and sines cast to bfloat16, for queries and for keys
        saved += [run.config.training.seq_len * model.head_dim * BF16_NBYTES] * 4
    if run.dropout:
        width = model.subspace.width or model.dim if run.in_subspace else model.dim
        saved += [run.each(width, _MASK_NBYTES)] * 2
    return saved


def _attention(run: _SegmentPass) -> list[int]:
    """Queries, keys, values, output, and the log-sum-exp of each softmax."""
    model, tokens = run.model, run.config.training.seq_len
    in_float32 = tokens <= MAX_FLOAT32_ATTENTION_TOKENS or run.dropout
    itemsize = max(ITEM_NBYTES["float32"], run.matmul_itemsize) if in_float32 else run.matmul_itemsize
    out = run.each(model.dim, run.matmul_itemsize)
    if run.dropout:  # keys and values are repeated for every head, and tokens x tokens matrices are materialised
        weights = [run.each(model.n_heads * tokens, nbytes) for nbytes in (itemsize, _MASK_NBYTES, itemsize)]
        return [run.each(model.dim, itemsize)] * 3 + [out] + weights
    if run.attention == "math":  # queries, keys, values and scores of every head, in at least float32
        wide = max(ITEM_NBYTES["float32"], run.matmul_itemsize)
        return [run.each(model.dim, wide)] * 3 + [out, run.each(model.n_heads * tokens, wide)]
    inputs = _attention_inputs(run, itemsize)
    before_cast = [run.each(model.dim, itemsize)] if itemsize != run.matmul_itemsize else []
    return [*inputs, out, *before_cast, run.each(model.n_heads, max(ITEM_NBYTES["float32"], itemsize))]


def _attention_inputs(run: _SegmentPass, itemsize: int) -> list[int]:
    """Queries, keys and values. If one matrix makes them and they are not cast, what is not rotated is a view of its
    output, which is saved as a whole."""
    spec, widths = run.model.spec, attention_widths(run.model)
    is_one_matrix = len(spec.attention.readers) == 1 and itemsize == run.matmul_itemsize
    if run.attention == "fused-repeated" and widths[1] != widths[0]:
        is_view = is_one_matrix and spec.rotary is None
        widths = (sum(widths) if is_view else widths[0], widths[0], widths[0])
    elif is_one_matrix:
        rotated = widths[:2] if spec.rotary is not None else ()
        widths = (*rotated, sum(widths))
    return [run.each(width, itemsize) for width in widths]
