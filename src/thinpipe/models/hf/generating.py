"""Reading a text token by token with a Hugging Face model in one segment, by transformers' own cache."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinpipe.models.hf.decoder import HuggingFaceModel


def reader(model: HuggingFaceModel) -> Callable[[list[int]], Tensor]:
    """A function that reads the next token ids of one text, and returns the logits of the token after them, [V].

    A model whose output has no cache reads the whole text again every time.
    """
    [segment] = model.segments
    whole, seen = segment.whole, list[int]()
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(whole.forward).parameters else {}
    device = next(model.parameters()).device
    cache: Any = None

    @torch.no_grad()
    def read(ids: list[int]) -> Tensor:
        nonlocal cache
        seen.extend(ids)
        given, known = (seen, {}) if cache is None else (ids, {"past_key_values": cache})
        output = whole(input_ids=torch.tensor([given], device=device), use_cache=True, **known, **last_only)
        cache = getattr(output, "past_key_values", None)
        logits_V: Tensor = output.logits[0, -1]
        return logits_V

    return read
