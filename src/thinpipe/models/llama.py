"""Llama 2/3: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Weight names are Hugging Face's.

Independent of whether the residual stream is dense or in a subspace: the space makes the layers that write to it.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.config.model import LlamaConfig, RopeScaling
from thinpipe.models.kv_cache import LayerKVCache, attend
from thinpipe.subspace import Space, Stream


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

    def __init__(self, config: LlamaConfig) -> None:
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
        config = self.config
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        positions = torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu")
        angles_TH = torch.outer(positions, frequencies).repeat(1, 2)
        self.cosines_TH.copy_(angles_TH.cos())
        self.sines_TH.copy_(angles_TH.sin())

    def forward(self, x_BNTH: Tensor, start: int = 0) -> Tensor:
        positions = slice(start, start + x_BNTH.shape[-2])
        cosines_TH, sines_TH = self.cosines_TH[positions].to(x_BNTH.dtype), self.sines_TH[positions].to(x_BNTH.dtype)
        left, right = x_BNTH.chunk(2, dim=-1)
        return x_BNTH * cosines_TH + torch.cat((-right, left), dim=-1) * sines_TH


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, space: Space, rotary: Rotary) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotary = rotary
        self.q_proj = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.o_proj = space.residual_writer(config.dim)

    def forward(self, x_BTD: Tensor, cache: LayerKVCache | None = None) -> Tensor:
        query, key, value = (
            projection(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        start = 0 if cache is None else cache.length
        mixed_BNTH = attend(self.rotary(query, start), self.rotary(key, start), value, cache)
        written: Tensor = self.o_proj(mixed_BNTH.transpose(1, 2).flatten(2))
        return written


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig, space: Space) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down_proj = space.residual_writer(config.hidden_dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        written: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return written


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig, space: Space, rotary: Rotary) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config, space, rotary)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config, space)

    def forward(self, stream: Stream, cache: LayerKVCache | None = None) -> Stream:
        stream = stream.add(self.self_attn(self.input_layernorm(stream.dense()), cache))
        return stream.add(self.mlp(self.post_attention_layernorm(stream.dense())))


class LlamaFirst(nn.Module):
    """Embedding: token ids to the state of the residual stream."""

    def __init__(self, config: LlamaConfig, space: Space) -> None:
        super().__init__()
        self.embed_tokens = space.embedding(config.vocab_size)

    def forward(self, ids_BT: Tensor, start: int = 0) -> Tensor:  # noqa: ARG002 (positions act in the blocks)
        state: Tensor = self.embed_tokens(ids_BT)
        return state


class LlamaLast(nn.Module):
    """Final norm and output head: residual stream to logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, stream: Stream) -> Tensor:
        logits_BTV: Tensor = self.lm_head(self.norm(stream.dense()))
        return logits_BTV


def llama_parts(
    config: LlamaConfig, space: Space, block_spaces: Sequence[Space]
) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    first, last, rotary = LlamaFirst(config, space), LlamaLast(config), Rotary(config)
    if config.tied:
        assert isinstance(first.embed_tokens, nn.Embedding)
        last.lm_head.weight = first.embed_tokens.weight
    return first, [LlamaBlock(config, block_space, rotary) for block_space in block_spaces], last
