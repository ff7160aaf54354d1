"""Activation memory of a segment by arithmetic: the tensors that autograd saves for the backward pass.

`tests/plan/test_needs.py` compares it with what `train/dry_run.py` counts on torch's fake tensors, for CPU kernels.
Lists hold the bytes of each saved tensor; a tensor that two operations save is counted once.
"""

from dataclasses import dataclass

from thinpipe.config.model import GPT2Config, LlamaConfig, ModelConfig
from thinpipe.config.run import RunConfig
from thinpipe.plan.parameters import ParameterGroup, SegmentShapes

ITEMSIZES = {"bfloat16": 2, "float32": 4, "float64": 8}
_MAX_FLOAT32_ATTENTION_TOKENS = 512  # up to here attention on a CPU is in float32 (`models/kv_cache.py`)
_ID_NBYTES = 8


@dataclass(frozen=True, kw_only=True)
class SavedActivations:
    """Activations of one micro-batch in one segment."""

    nbytes: int
    """Bytes held from the forward to the backward pass."""
    peak_extra_nbytes: int
    """Additional bytes while the segment computes."""


def count_saved_activations(
    model: ModelConfig, config: RunConfig, index: int, shapes: SegmentShapes
) -> SavedActivations:
    """Activations of segment `index`, which has these parameters."""
    run = _SegmentPass(model=model, config=config, in_subspace=model.segments[index].start < model.first_free_block)
    ends = _before_blocks(run, shapes) + _after_blocks(run, shapes)
    block = _block(run, shapes.block)
    basis = run.basis_copy if run.in_subspace or index else []
    everything = ends + block * shapes.blocks + basis
    gradients = 2 * max(everything)
    if not config.execution.checkpoint_activations:
        return SavedActivations(nbytes=sum(everything), peak_extra_nbytes=gradients)
    entering = run.each(model.subspace.width or model.dim if run.in_subspace else model.dim, run.itemsize)
    outside = sum(ends) + shapes.blocks * entering
    if shapes.last or not run.in_subspace:
        outside += sum(basis)  # the stream is reconstructed outside of checkpointed blocks
    one_block = (sum(everything) - outside) // shapes.blocks
    base = run.each(model.dim, run.itemsize) if run.in_subspace else 0
    return SavedActivations(nbytes=outside + base, peak_extra_nbytes=max(0, one_block) + gradients)


@dataclass(frozen=True, kw_only=True)
class _SegmentPass:
    """Sizes for one micro-batch in one segment."""

    model: ModelConfig
    config: RunConfig
    in_subspace: bool

    @property
    def itemsize(self) -> int:
        """Bytes per element of weights and of the residual stream."""
        return ITEMSIZES[self.config.training.dtype]

    @property
    def uses_autocast(self) -> bool:
        """Under autocast the factors of matrix products are copied to bfloat16; float64 is exempt."""
        return self.config.execution.autocast_bf16 and self.config.training.dtype == "float32"

    @property
    def matmul_itemsize(self) -> int:
        """Bytes per element of the result of a matrix product."""
        return 2 if self.uses_autocast else self.itemsize

    @property
    def float32_itemsize(self) -> int:
        """Bytes per element where at least float32 is used."""
        return max(4, self.itemsize)

    @property
    def tokens(self) -> int:
        return self.config.microbatch_size * self.config.training.seq_len

    def each(self, numel: int, itemsize: int) -> int:
        """Bytes of `numel` elements per token of the micro-batch."""
        return self.tokens * numel * itemsize

    def copies(self, group: ParameterGroup) -> list[int]:
        """Bytes of the bfloat16 copies that autocast makes of matrices."""
        return [2 * each.numel for each in group if each.is_matmul] if self.uses_autocast else []

    @property
    def ids(self) -> int:
        """Bytes of the token ids of the micro-batch, labels included."""
        return self.config.microbatch_size * (self.config.training.seq_len + 1) * _ID_NBYTES

    @property
    def basis_copy(self) -> list[int]:
        """Bytes of the basis cast to bfloat16, if the stream is: the basis itself is at least float32."""
        width = self.model.subspace.width
        return [self.model.dim * width * 2] if width is not None and self.itemsize == 2 else []


def _before_blocks(run: _SegmentPass, shapes: SegmentShapes) -> list[int]:
    model, projection = run.model, run.model.projection
    labels_are_ids = bool(shapes.last) and run.config.microbatch_size == 1  # a slice of one row needs no copy
    looks_up = bool(shapes.first) or (bool(shapes.token_prior) and projection.token_prior_rank > 0)
    saved = [run.ids] if looks_up or labels_are_ids else []
    if shapes.last and not labels_are_ids:
        saved.append(run.each(1, _ID_NBYTES))
    if model.has_position_table and shapes.first:
        saved.append(run.config.training.seq_len * _ID_NBYTES)
    if shapes.first:
        width = projection.embedding_rank or model.subspace.width or model.dim
        saved += [run.each(width, run.matmul_itemsize)] if projection.embedding_rank else []
        saved += [run.each(width, run.itemsize)] if _dropout(model) else []
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


def _after_blocks(run: _SegmentPass, shapes: SegmentShapes) -> list[int]:
    model = run.model
    if shapes.last:
        logits = [run.each(model.vocab_size, run.float32_itemsize), run.float32_itemsize]  # logits, and the summed loss
        return [*_norm(run), run.each(model.dim, run.matmul_itemsize), *run.copies(shapes.last), *logits]
    saved = [run.each(model.state_width, run.itemsize)]  # the message
    if shapes.down_projection:
        is_bottleneck = model.projection.kind == "bottleneck"
        saved.append(run.each(model.dim, run.matmul_itemsize if is_bottleneck else run.itemsize))
        saved += _inside_projection(run, run.matmul_itemsize)
        saved += run.copies(shapes.down_projection) if is_bottleneck else []
    return saved


def _norm(run: _SegmentPass) -> list[int]:
    """Input and statistics of a norm; for RMSNorm also the normalised values before scaling."""
    wide = run.model.dim
    if isinstance(run.model, GPT2Config):
        return [run.each(wide, run.itemsize), run.each(1, run.itemsize), run.each(1, run.itemsize)]
    return [
        run.each(wide, run.float32_itemsize),
        run.each(1, run.float32_itemsize),
        run.each(wide, run.float32_itemsize),
    ]


def _block(run: _SegmentPass, group: ParameterGroup) -> list[int]:
    model = run.model
    assert isinstance(model, LlamaConfig | GPT2Config), f"a plan does not know blocks of {model.family}"
    is_llama = isinstance(model, LlamaConfig)
    readers, inside = ((3, 2), 4) if is_llama else ((1, 1), 2)  # matrices that read each norm; tensors in the MLP
    saved = _norm(run) * 2 + _attention(run)
    for count in readers:  # under autocast each matrix saves its own copy of its input
        saved += [run.each(model.dim, run.matmul_itemsize)] * (count if run.uses_autocast else 1)
    saved += [run.each(model.hidden_dim, run.matmul_itemsize)] * inside + run.copies(group)
    if is_llama and run.matmul_itemsize == 2:
        saved += [run.config.training.seq_len * model.head_dim * 2] * 4  # RoPE cosines and sines, for queries and keys
    if _dropout(model):
        width = model.subspace.width or model.dim if run.in_subspace else model.dim
        saved += [run.each(width, run.matmul_itemsize)] * 2
    return saved


def _attention(run: _SegmentPass) -> list[int]:
    """Queries, keys, values, output, and the log-sum-exp of each softmax."""
    model, tokens = run.model, run.config.training.seq_len
    heads = model.n_kv_heads if isinstance(model, LlamaConfig) else model.n_heads
    in_float32 = tokens <= _MAX_FLOAT32_ATTENTION_TOKENS or _dropout(model)
    itemsize = max(4, run.matmul_itemsize) if in_float32 else run.matmul_itemsize
    sides = [run.each(heads * model.head_dim, itemsize)] * 2 + [run.each(model.dim, itemsize)]
    out = run.each(model.dim, run.matmul_itemsize)
    if _dropout(model):  # with dropout every kernel materialises the tokens x tokens matrix
        return [*sides, out] + [run.each(model.n_heads * tokens, itemsize)] * 3
    before_cast = [run.each(model.dim, itemsize)] if itemsize != run.matmul_itemsize else []
    return [*sides, out, *before_cast, run.each(model.n_heads, max(4, itemsize))]


def _dropout(model: ModelConfig) -> bool:
    return isinstance(model, GPT2Config) and model.dropout > 0
