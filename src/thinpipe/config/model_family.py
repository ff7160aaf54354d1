"""Description of a decoder family: which layers a model has and what they are called. Imports no torch.

`models/decoder.py` builds modules from a description, `config/parameter_shapes.py` states the shapes of their
parameters, `planning/` computes costs, and `models/hf` converts Hugging Face folders. A family is one file in
`config/families`. The kinds of norms and MLPs to choose from are implemented in `models/decoder.py`, and what they save
for the backward pass is stated in `planning/activations.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from thinpipe.config.huggingface_format import HuggingFaceFormat

NormKind = Literal["rms", "layer"]
"""rms: RMSNorm, with a scale. layer: LayerNorm, with a scale and a bias."""
MLPKind = Literal["swiglu", "gelu_tanh"]
"""swiglu: silu(gate) x up, of two reading matrices. gelu_tanh: GELU by its tanh formula, of one reading matrix."""
FromConfig = Callable[[Any], Any]
"""Reads a value from a configuration of the family, such as `operator.attrgetter("hidden_dim")`."""

MAX_FLOAT32_ATTENTION_TOKENS = 512
"""Maximum text length in tokens for which bfloat16 attention on a CPU is computed in float32, which is faster there."""

AttentionKernel = Literal["fused", "fused-repeated", "math"]
"""How attention runs on a device in training (`device/attention.py`). fused: no scores are kept. fused-repeated: none
either, with keys and values repeated for every head. math: tokens x tokens scores are kept for every head."""

MAX_LOGITS = 2**25
"""Maximum number of logits that exist at once in training and evaluation: 128 MiB in float32. With more, output head
and the loss are computed for one chunk of the vocabulary after the other."""
_ROW_MULTIPLE = 8
"""Matrix units of GPUs take rows in multiples of this number."""


def vocabulary_chunk(tokens: int, vocab_size: int) -> int:
    """Rows of the output head that are computed at a time for the loss of this many tokens; `vocab_size`: all of them.
    A function of the shapes alone, so that every placement and every device sums in the same chunks."""
    if tokens * vocab_size <= MAX_LOGITS:
        return vocab_size
    rows = MAX_LOGITS // tokens // _ROW_MULTIPLE * _ROW_MULTIPLE
    return min(vocab_size, max(_ROW_MULTIPLE, rows))


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal self-attention of a block."""

    name: str
    norm: str
    """Name of the norm before attention."""
    readers: tuple[str] | tuple[str, str, str]
    """Names of the matrices that make queries, keys and values; a single name if one matrix makes all three."""
    writer: str
    """Name of the output projection, which writes to the residual stream."""
    reader_bias: bool = False
    """Whether the readers have biases."""
    writer_bias: bool = False
    """Whether the writer has a bias."""
    n_kv_heads: FromConfig = attrgetter("n_heads")
    """Number of heads of keys and values (grouped-query attention)."""


@dataclass(frozen=True, kw_only=True)
class MLP:
    """MLP of a block."""

    name: str
    norm: str
    """Name of the norm before the MLP."""
    kind: MLPKind
    readers: tuple[str, ...]
    """Names of the matrices that read the stream, in the order in which `kind` names them."""
    writer: str
    """Name of the matrix that writes to the residual stream."""
    reader_bias: bool = False
    """Whether the readers have biases."""
    writer_bias: bool = False
    """Whether the writer has a bias."""
    hidden_dim: FromConfig = attrgetter("hidden_dim")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions: base of the frequencies, and their `RopeScaling` or None."""

    theta: FromConfig = attrgetter("rope_theta")
    scaling: FromConfig = attrgetter("rope_scaling")


def _no_dropout(_config: Any) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """A decoder: embedding, blocks of norm, attention, norm and MLP, final norm and output head (`lm_head`)."""

    name: str
    """Name of the family in checkpoints and in Hugging Face's config.json."""
    norm: NormKind
    token_embedding: str
    """Name of the token embedding."""
    position_embedding: str | None = None
    """Name of the learned position embedding. None: positions are not added to the residual stream."""
    rotary: Rotary | None = None
    attention: Attention
    mlp: MLP
    final_norm: str
    dropout: FromConfig = _no_dropout
    """Dropout probability of the embedding, of attention weights and of what attention and MLP write."""
    huggingface: HuggingFaceFormat

    @property
    def frozen_tables(self) -> dict[str, str]:
        """Parameter name of each embedding -> attribute of `Subspace` with the frozen table of that embedding."""
        tables = {f"first.{self.token_embedding}.weight": "tokens"}
        if self.position_embedding is not None:
            tables[f"first.{self.position_embedding}.weight"] = "positions"
        return tables
