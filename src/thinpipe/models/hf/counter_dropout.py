"""Dropout inside Hugging Face's own layers, with masks from our counter hash.

transformers draws dropout from the generator of the process, whose numbers depend on what else the process has drawn:
on how many segments it has, and on blocks that are computed again in the backward pass. Here a mask is a function of a
seed and of the number of the dropout within a block.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thinpipe.device.counter_random import dropout


class CounterDropout(TorchFunctionMode):
    """Within this context, `torch.nn.functional.dropout`, which `nn.Dropout` calls, takes its masks from `seed`; so
    does torch's fused attention, which is computed unfused if it drops weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.drawn = seed, 0

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.dropout:
            return self._drop(*args, **kwargs)
        if function is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            return self._attend(*args, **kwargs)
        return function(*args, **kwargs)

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG002
        if not training or not p:
            return input
        self.drawn += 1
        return dropout(input, p, self.seed, self.drawn)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """torch's attention by its definition, with [queries, keys] weights for every head."""
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(repeats, dim=-3) for each in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        return self._drop(weights, dropout_p) @ value
