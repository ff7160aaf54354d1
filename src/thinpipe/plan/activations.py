"""What the forward pass of a segment leaves for the backward pass, by arithmetic: tensors that autograd keeps.

Held equal to what `train/dry_run.py` counts on torch's fake tensors, of the kernels of a CPU, in
`tests/plan/test_needs.py`. Every list is of bytes, a number for each tensor; those that two operations keep count once.
"""

from dataclasses import dataclass

from thinpipe.models.config import GPT2Config, LlamaConfig, ModelConfig
from thinpipe.plan.parameters import Part, SegmentParts
from thinpipe.train.config import RunConfig

ITEMSIZES = {"bfloat16": 2, "float32": 4, "float64": 8}
_SHORT_TEXT = 512  # up to which CPUs attend in float32 (`models/memory.py`)
_ID_NBYTES = 8


@dataclass(frozen=True, kw_only=True)
class Kept:
    """By one micro-batch."""

    nbytes: int
    """From its forward to its backward pass."""
    at_work_nbytes: int
    """More, for as long as the segment computes."""


def count_kept(model: ModelConfig, config: RunConfig, index: int, parts: SegmentParts) -> Kept:
    """Of the segment `index`, which has these parts."""
    run = _Pass(model=model, config=config, is_confined=model.segments[index].start < model.first_free_block)
    ends = _before_blocks(run, parts) + _after_blocks(run, parts)
    block = _block(run, parts.block)
    basis = run.basis_copy if run.is_confined or index else []
    everything = ends + block * parts.blocks + basis
    gradients = 2 * max(everything)
    if not config.execution.checkpoint_activations:
        return Kept(nbytes=sum(everything), at_work_nbytes=gradients)
    entering = run.each(model.subspace.width or model.dim if run.is_confined else model.dim, run.state)
    outside = sum(ends) + parts.blocks * entering
    if parts.last or not run.is_confined:
        outside += sum(basis)  # the stream is read outside of blocks
    one_block = (sum(everything) - outside) // parts.blocks
    base = run.each(model.dim, run.state) if run.is_confined else 0
    return Kept(nbytes=outside + base, at_work_nbytes=max(0, one_block) + gradients)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One micro-batch in one segment."""

    model: ModelConfig
    config: RunConfig
    is_confined: bool

    @property
    def state(self) -> int:
        """Bytes of a number in the stream and in weights."""
        return ITEMSIZES[self.config.training.dtype]

    @property
    def casts(self) -> bool:
        """Factors of products are copied to bfloat16 first; float64 never is."""
        return self.config.execution.autocast_bf16 and self.config.training.dtype == "float32"

    @property
    def product(self) -> int:
        """Bytes of a number that a matrix product makes."""
        return 2 if self.casts else self.state

    @property
    def rounded(self) -> int:
        """Of a number where bfloat16 would not do."""
        return max(4, self.state)

    @property
    def tokens(self) -> int:
        return self.config.microbatch_size * self.config.training.seq_len

    def each(self, numbers: int, itemsize: int) -> int:
        """Of so many numbers for every token."""
        return self.tokens * numbers * itemsize

    def copies(self, part: Part) -> list[int]:
        """Of matrices, in bfloat16."""
        return [2 * each.numbers for each in part if each.multiplies] if self.casts else []

    @property
    def ids(self) -> int:
        """Of all ids of the micro-batch, labels among them."""
        return self.config.microbatch_size * (self.config.training.seq_len + 1) * _ID_NBYTES

    @property
    def basis_copy(self) -> list[int]:
        """The basis is float32 at least, and the stream is read in its own dtype."""
        width = self.model.subspace.width
        return [self.model.dim * width * 2] if width is not None and self.state == 2 else []


def _before_blocks(run: _Pass, parts: SegmentParts) -> list[int]:
    model, neck = run.model, run.model.neck
    labels_are_ids = bool(parts.last) and run.config.microbatch_size == 1  # a part of one row is no copy
    looks_up = bool(parts.first) or (bool(parts.anchors) and neck.anchor_rank > 0)
    kept = [run.ids] if looks_up or labels_are_ids else []
    if parts.last and not labels_are_ids:
        kept.append(run.each(1, _ID_NBYTES))
    if model.has_position_table and parts.first:
        kept.append(run.config.training.seq_len * _ID_NBYTES)
    if parts.first:
        width = neck.first_rank or model.subspace.width or model.dim
        kept += [run.each(width, run.product)] if neck.first_rank else []
        kept += [run.each(width, run.state)] if _dropout(model) else []
    if parts.anchors and neck.anchor_rank:
        kept.append(run.each(neck.anchor_rank * neck.anchor_reach, run.product))
    if parts.anchors and neck.ngram_rows:
        kept += [run.each(1, _ID_NBYTES), run.each(neck.ngram_rank, run.product)]
    kept += run.copies(parts.first + parts.anchors)
    if parts.entry:
        kept.append(run.each(model.state_width, run.state))
        kept += _inside_gate(run, run.state)
    return kept


def _inside_gate(run: _Pass, itemsize: int) -> list[int]:
    """Of a bottleneck's small network: before and after its nonlinearity."""
    if run.model.neck.kind != "bottleneck":
        return []
    return [run.each(run.model.neck.hidden or 2 * run.model.state_width, itemsize)] * 2


def _after_blocks(run: _Pass, parts: SegmentParts) -> list[int]:
    model = run.model
    if parts.last:
        logits = [run.each(model.vocab_size, run.rounded), run.rounded]  # and the sum of losses
        return [*_norm(run), run.each(model.dim, run.product), *run.copies(parts.last), *logits]
    kept = [run.each(model.state_width, run.state)]  # what is sent
    if parts.exit:
        is_bottleneck = model.neck.kind == "bottleneck"
        kept.append(run.each(model.dim, run.product if is_bottleneck else run.state))
        kept += _inside_gate(run, run.product)
        kept += run.copies(parts.exit) if is_bottleneck else []
    return kept


def _norm(run: _Pass) -> list[int]:
    """What enters it, statistics, and for RMSNorm what it makes before it scales."""
    wide = run.model.dim
    if isinstance(run.model, GPT2Config):
        return [run.each(wide, run.state), run.each(1, run.state), run.each(1, run.state)]
    return [run.each(wide, run.rounded), run.each(1, run.rounded), run.each(wide, run.rounded)]


def _block(run: _Pass, part: Part) -> list[int]:
    model = run.model
    assert isinstance(model, LlamaConfig | GPT2Config), f"a plan does not know blocks of {model.family}"
    is_llama = isinstance(model, LlamaConfig)
    readers, inside = ((3, 2), 4) if is_llama else ((1, 1), 2)  # of what each norm makes; of tensors inside the MLP
    kept = _norm(run) * 2 + _attention(run)
    for count in readers:  # each copies what it reads
        kept += [run.each(model.dim, run.product)] * (count if run.casts else 1)
    kept += [run.each(model.hidden_dim, run.product)] * inside + run.copies(part)
    if is_llama and run.product == 2:
        kept += [run.config.training.seq_len * model.head_dim * 2] * 4  # cosines and sines, of queries and of keys
    if _dropout(model):
        width = model.subspace.width or model.dim if run.is_confined else model.dim
        kept += [run.each(width, run.product)] * 2
    return kept


def _attention(run: _Pass) -> list[int]:
    """Queries, keys, values, what comes out, and the logarithm of each softmax's sum."""
    model, tokens = run.model, run.config.training.seq_len
    heads = model.n_kv_heads if isinstance(model, LlamaConfig) else model.n_heads
    in_float32 = tokens <= _SHORT_TEXT or _dropout(model)
    itemsize = max(4, run.product) if in_float32 else run.product
    sides = [run.each(heads * model.head_dim, itemsize)] * 2 + [run.each(model.dim, itemsize)]
    out = run.each(model.dim, run.product)
    if _dropout(model):  # then no kernel does without the matrix of tokens x tokens
        return [*sides, out] + [run.each(model.n_heads * tokens, itemsize)] * 3
    before_cast = [run.each(model.dim, itemsize)] if itemsize != run.product else []
    return [*sides, out, *before_cast, run.each(model.n_heads, max(4, itemsize))]


def _dropout(model: ModelConfig) -> bool:
    return isinstance(model, GPT2Config) and model.dropout > 0
