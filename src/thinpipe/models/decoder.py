"""Decoder modules of every model family, built from the family's description (`config/model_family.py`).

Layers have the names that the description gives them, which are Hugging Face's. Independent of whether the residual
stream is dense or in a subspace: the space makes the layers that write to it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.config.model import ModelConfig, RopeScaling
from thinpipe.config.model_family import MLPKind, NormKind
from thinpipe.config.parameter_shapes import attention_widths
from thinpipe.device.attention import attention_kernel
from thinpipe.device.counter_random import dropout
from thinpipe.models.kv_cache import LayerKVCache, attend
from thinpipe.models.token_losses import token_losses
from thinpipe.subspace import Space, Stream

NORMS: dict[NormKind, type[nn.RMSNorm] | type[nn.LayerNorm]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gelu_tanh(hidden: Tensor) -> Tensor:
    return F.gelu(hidden, approximate="tanh")


MLPS: dict[MLPKind, Callable[..., Tensor]] = {"swiglu": _swiglu, "gelu_tanh": _gelu_tanh}
"""Hidden activations of an MLP from the outputs of its readers."""


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """The head_dim/2 rotary frequencies in radians per position. With Llama 3's scaling, low frequencies are divided by
    `factor`, with a smooth transition to the unscaled high frequencies."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = ((turns - scaling.low_freq_factor) / spread).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


class Rotary(nn.Module):
    """Rotary embedding: rotates pairs (i, i + head_dim/2) of queries and keys by position times frequency. All blocks
    share one instance."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.cosines_TH: Tensor
        self.sines_TH: Tensor
        shape = (config.max_seq_len, config.head_dim)
        self.register_buffer("cosines_TH", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sines_TH", torch.empty(shape, dtype=torch.float32), persistent=False)
        if not self.cosines_TH.is_meta:
            self.fill()

    def fill(self) -> None:
        config, rotary = self.config, self.config.spec.rotary
        assert rotary is not None
        frequencies = rotary_frequencies(config.head_dim, rotary.theta(config), rotary.scaling(config))
        positions = torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu")
        angles_TH = torch.outer(positions, frequencies).repeat(1, 2)
        self.cosines_TH.copy_(angles_TH.cos())
        self.sines_TH.copy_(angles_TH.sin())

    def forward(self, x_BNTH: Tensor, start: int = 0) -> Tensor:
        positions = slice(start, start + x_BNTH.shape[-2])
        cosines_TH, sines_TH = self.cosines_TH[positions].to(x_BNTH.dtype), self.sines_TH[positions].to(x_BNTH.dtype)
        left, right = x_BNTH.chunk(2, dim=-1)
        return x_BNTH * cosines_TH + torch.cat((-right, left), dim=-1) * sines_TH


class Dropout(nn.Module):
    """Dropout whose masks are a function of a seed and the name of the layer: equal on every device, and when a block
    is computed again in the backward pass. Off in evaluation and at rate 0."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rate: float = config.spec.dropout(config)

    @property
    def is_on(self) -> bool:
        return self.training and self.rate > 0

    def forward(self, x: Tensor, seed: int | None, layer: str) -> Tensor:
        """Raises ValueError without a seed."""
        if not self.is_on:
            return x
        if seed is None:
            raise ValueError("dropout is on: pass dropout_seed, or call model.eval() first")
        return dropout(x, self.rate, seed, layer)


class Attention(nn.Module):
    """Causal self-attention, with rotary positions if `rotary` is given."""

    def __init__(self, config: ModelConfig, space: Space, rotary: Rotary | None) -> None:
        super().__init__()
        self.spec, self.head_dim, self.rotary = config.spec.attention, config.head_dim, rotary
        self.dropout = Dropout(config)
        self.widths = attention_widths(config)
        self.repeats_keys = False
        is_fused = len(self.spec.readers) == 1
        for name, width in zip(self.spec.readers, (sum(self.widths),) if is_fused else self.widths, strict=True):
            self.add_module(name, nn.Linear(config.dim, width, bias=self.spec.reader_bias))
        self.add_module(self.spec.writer, space.residual_writer(config.dim, bias=self.spec.writer_bias))

    def choose_kernel(self, *, autocast_bf16: bool) -> None:
        """Repeats keys and values for every head from now on, if the device of the weights has no fused kernel for
        fewer heads of keys than of queries, and one for as many. Without effect on the result but for its rounding."""
        weight = next(self.parameters())
        query_width, key_width, _ = self.widths
        kernel = attention_kernel(
            weight.device,
            torch.bfloat16 if autocast_bf16 else weight.dtype,
            heads=query_width // self.head_dim,
            kv_heads=key_width // self.head_dim,
            head_dim=self.head_dim,
        )
        self.repeats_keys = kernel == "fused-repeated"

    def forward(self, x_BTD: Tensor, cache: LayerKVCache | None = None, dropout_seed: int | None = None) -> Tensor:
        read = [getattr(self, name)(x_BTD) for name in self.spec.readers]
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (read[0].split(self.widths, dim=-1) if len(read) == 1 else read)
        )
        if self.rotary is not None:
            start = 0 if cache is None else cache.length
            query, key = self.rotary(query, start), self.rotary(key, start)
        if self.repeats_keys and cache is None:
            queries_per_key = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(queries_per_key, dim=1) for each in (key, value))
        drop = partial(self.dropout, seed=dropout_seed, layer="attention weights") if self.dropout.is_on else None
        mixed_BNTH = attend(query, key, value, cache, drop)
        written: Tensor = getattr(self, self.spec.writer)(mixed_BNTH.transpose(1, 2).flatten(2))
        dropped: Tensor = self.dropout(written, dropout_seed, "attention")
        return dropped


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, space: Space) -> None:
        super().__init__()
        self.spec, self.dropout = config.spec.mlp, Dropout(config)
        hidden_dim: int = self.spec.hidden_dim(config)
        for name in self.spec.readers:
            self.add_module(name, nn.Linear(config.dim, hidden_dim, bias=self.spec.reader_bias))
        self.add_module(self.spec.writer, space.residual_writer(hidden_dim, bias=self.spec.writer_bias))

    def forward(self, x_BTD: Tensor, dropout_seed: int | None = None) -> Tensor:
        hidden = MLPS[self.spec.kind](*(getattr(self, name)(x_BTD) for name in self.spec.readers))
        dropped: Tensor = self.dropout(getattr(self, self.spec.writer)(hidden), dropout_seed, "mlp")
        return dropped


class Block(nn.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self, config: ModelConfig, space: Space, rotary: Rotary | None) -> None:
        super().__init__()
        self.spec = config.spec
        self.add_module(self.spec.attention.norm, _norm(config))
        self.add_module(self.spec.attention.name, Attention(config, space, rotary))
        self.add_module(self.spec.mlp.norm, _norm(config))
        self.add_module(self.spec.mlp.name, MLP(config, space))

    def forward(self, stream: Stream, cache: LayerKVCache | None = None, dropout_seed: int | None = None) -> Stream:
        attention, mlp = self.spec.attention, self.spec.mlp
        read_BTD = getattr(self, attention.norm)(stream.dense())
        stream = stream.add(getattr(self, attention.name)(read_BTD, cache, dropout_seed))
        return stream.add(getattr(self, mlp.name)(getattr(self, mlp.norm)(stream.dense()), dropout_seed))


class Embedding(nn.Module):
    """Token ids, and positions where the family has a table of them, to the state of the residual stream."""

    def __init__(self, config: ModelConfig, space: Space) -> None:
        super().__init__()
        self.spec, self.dropout = config.spec, Dropout(config)
        self.add_module(self.spec.token_embedding, space.embedding(config.vocab_size))
        if self.spec.position_embedding is not None:
            self.add_module(self.spec.position_embedding, space.embedding(config.max_seq_len))

    def forward(self, ids_BT: Tensor, start: int = 0, dropout_seed: int | None = None) -> Tensor:
        state: Tensor = getattr(self, self.spec.token_embedding)(ids_BT)
        if self.spec.position_embedding is not None:
            positions_T = torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device)
            state = state + getattr(self, self.spec.position_embedding)(positions_T)
        dropped: Tensor = self.dropout(state, dropout_seed, "embedding")
        return dropped


class Head(nn.Module):
    """Final norm and output head: residual stream to logits, or to the cross-entropy of every token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_name = config.spec.final_norm
        self.add_module(self.norm_name, _norm(config))
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, stream: Stream, targets_BT: Tensor | None = None) -> Tensor:
        states_BTD = getattr(self, self.norm_name)(stream.dense())
        if targets_BT is not None:
            return token_losses(states_BTD, self.lm_head.weight, targets_BT)
        logits_BTV: Tensor = self.lm_head(states_BTD)
        return logits_BTV


def build_layers(
    config: ModelConfig, space: Space, block_spaces: Sequence[Space]
) -> tuple[Embedding, list[Block], Head]:
    """Embedding, blocks and head. `block_spaces`: the space to which each block writes."""
    first, last = Embedding(config, space), Head(config)
    rotary = None if config.spec.rotary is None else Rotary(config)
    if config.tied:
        last.lm_head.weight = getattr(first, config.spec.token_embedding).weight
    return first, [Block(config, block_space, rotary) for block_space in block_spaces], last


def _norm(config: ModelConfig) -> nn.Module:
    return NORMS[config.spec.norm](config.dim, eps=config.norm_eps)
