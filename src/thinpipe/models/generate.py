"""Autoregressive generation of token ids, greedy or with nucleus sampling, with a KV cache.

One text, in one process; no tokenizer and no batches.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinpipe.core.errors import UserError
from thinpipe.models.kv_cache import KVCache
from thinpipe.models.model import Model

if TYPE_CHECKING:
    from thinpipe.models.hf.decoder import HuggingFaceModel

_PREFILL_CHUNK = 256
"""Tokens of the prompt per forward pass: the logits of a whole long prompt, tokens x vocabulary, could be larger than
the model."""


def generate(
    model: "Model | HuggingFaceModel",
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Yields the token ids that follow the prompt, one at a time.

    Temperature 0 is greedy decoding. `top_p` samples from the smallest set of most likely tokens with at least this
    total probability. Generation ends after `max_new_tokens`, after `stop_id` (which is yielded), or when prompt and
    generated tokens reach max_seq_len. Raises UserError for an invalid prompt or setting, ValueError if the model is in
    training mode with dropout.
    """
    config = model.config
    longest = len(prompt_ids) + max_new_tokens + 1 if config.max_seq_len is None else config.max_seq_len
    if not 0 < len(prompt_ids) < longest:
        raise UserError(
            f"a prompt of {len(prompt_ids)} tokens: give at least one, and fewer than max_seq_len {config.max_seq_len}"
        )
    if not all(0 <= token < config.vocab_size for token in prompt_ids):
        raise UserError(f"token ids must lie between 0 and {config.vocab_size - 1}: is it this model's tokenizer?")
    if temperature < 0 or not 0 < top_p <= 1 or max_new_tokens < 0:
        raise UserError(
            f"temperature {temperature} must be 0 or more, top_p {top_p} above 0 and at most 1, "
            f"max_new_tokens {max_new_tokens} 0 or more"
        )
    dropout: float = getattr(config, "dropout", 0.0)
    if model.training and dropout:
        raise ValueError("dropout is on: call model.eval() first")
    end = min(len(prompt_ids) + max_new_tokens, longest)
    read = partial(_last_logits, model, KVCache(end)) if isinstance(model, Model) else _huggingface_reader(model)
    return _stream(read, list(prompt_ids), end, temperature, top_p, torch.Generator().manual_seed(seed), stop_id)


Read = Callable[[list[int]], Tensor]
"""Reads the next token ids of a text; returns the logits of the token after them, [V]."""


def _stream(
    read: Read,
    ids: list[int],
    end: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
    stop_id: int | None,
) -> Iterator[int]:
    unread = ids
    for _ in range(len(ids), end):
        token = sample_token(read(unread), temperature, top_p, generator)
        yield token
        if token == stop_id:
            return
        unread = [token]


@torch.no_grad()
def _last_logits(model: Model, cache: KVCache, ids: list[int]) -> Tensor:
    """Processes `ids` in chunks, extending `cache`; returns the logits of the last token, [V]."""
    device = next(model.parameters()).device
    logits_BTV = torch.empty(0)
    for piece_BT in torch.tensor([ids], device=device).split(_PREFILL_CHUNK, dim=1):
        logits_BTV = model(piece_BT, cache)
    return logits_BTV[0, -1]


def _huggingface_reader(model: "HuggingFaceModel") -> Read:
    from thinpipe.models.hf.generating import reader  # transformers takes seconds to import

    return reader(model)


def sample_token(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Samples one token id, on the CPU in float64, with exactly one random number from `generator` (none if greedy).

    Raises UserError if the logits are not finite.
    """
    logits_V = logits_V.to("cpu", torch.float64)
    if not torch.isfinite(logits_V).all():
        raise UserError("the model's logits are not finite: was it loaded, and did its training converge?")
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, ids_V = (logits_V / temperature).softmax(0).sort(descending=True, stable=True)
    up_to_V = probabilities_V.cumsum(0)
    kept = int((up_to_V - probabilities_V < top_p).sum())  # tokens before which the cumulative sum is below top_p
    drawn = torch.rand((), generator=generator, dtype=torch.float64) * up_to_V[kept - 1]
    return int(ids_V[torch.searchsorted(up_to_V[:kept], drawn)])
