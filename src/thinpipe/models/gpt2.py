"""GPT-2: LayerNorm, learned positions, GELU, biases. Weight names are Hugging Face's.

In a subspace model, positions are P_fixed (on every segment, from a seed) plus trainable coordinates (first segment
only), and the biases of residual writers are coordinates too. The space handles this: it makes writers and embeddings.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.config.model import GPT2Config
from thinpipe.models.kv_cache import LayerKVCache, attend
from thinpipe.subspace import Space, Stream


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, space: Space) -> None:
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.c_attn = nn.Linear(config.dim, 3 * config.dim)
        self.c_proj = space.residual_writer(config.dim, bias=True)

    def forward(self, x_BTD: Tensor, cache: LayerKVCache | None = None) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.c_attn(x_BTD).chunk(3, dim=-1)
        )
        mixed_BNTH = attend(query, key, value, cache, dropout=self.dropout if self.training else 0.0)
        written: Tensor = self.c_proj(mixed_BNTH.transpose(1, 2).flatten(2))
        return F.dropout(written, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config, space: Space) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.dim, config.hidden_dim)
        self.c_proj = space.residual_writer(config.hidden_dim, bias=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        written: Tensor = self.c_proj(F.gelu(self.c_fc(x_BTD), approximate="tanh"))
        return F.dropout(written, self.dropout, self.training)


class GPT2Block(nn.Module):
    def __init__(self, config: GPT2Config, space: Space) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config, space)
        self.ln_2 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config, space)

    def forward(self, stream: Stream, cache: LayerKVCache | None = None) -> Stream:
        stream = stream.add(self.attn(self.ln_1(stream.dense()), cache))
        return stream.add(self.mlp(self.ln_2(stream.dense())))


class GPT2First(nn.Module):
    """Embedding: token ids and positions to the state of the residual stream."""

    def __init__(self, config: GPT2Config, space: Space) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.wte = space.embedding(config.vocab_size)
        self.wpe = space.embedding(config.max_seq_len)

    def forward(self, ids_BT: Tensor, start: int = 0) -> Tensor:
        positions_T = torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device)
        state: Tensor = self.wte(ids_BT) + self.wpe(positions_T)
        return F.dropout(state, self.dropout, self.training)


class GPT2Last(nn.Module):
    """Final norm and output head: residual stream to logits."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_f = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, stream: Stream) -> Tensor:
        logits_BTV: Tensor = self.lm_head(self.ln_f(stream.dense()))
        return logits_BTV


def gpt2_parts(
    config: GPT2Config, space: Space, block_spaces: Sequence[Space]
) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    first, last = GPT2First(config, space), GPT2Last(config)
    if config.tied:
        assert isinstance(first.wte, nn.Embedding)
        last.lm_head.weight = first.wte.weight
    return first, [GPT2Block(config, block_space) for block_space in block_spaces], last
