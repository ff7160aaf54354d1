"""Small Hugging Face models in folders, as `save_pretrained` writes them, and what transformers itself computes."""

import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING

from thinpipe.models.hf.hollow import causal_model_class, quiet
from thinpipe.models.hf.pretrained_config import transformers_config
from thinpipe.models.hf.shrink import shrink

HANDFUL = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "phi3",
    "gpt2",
    "smollm3",
    "mixtral",
)
"""Model types of the default tests: most of what people tune, and one with experts."""


def default_config(model_type, /, **changes):
    """config.json of a model type: transformers' defaults, which are a published size, with changes."""
    with quiet():
        return {**CONFIG_MAPPING[model_type]().to_dict(), **changes}


def small_config(model_type, /, **changes):
    """config.json of a small model without dropout."""
    return {**shrink(default_config(model_type)), **NO_DROPOUT, **changes}


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def save_model(stored, folder, *, shard="100KB", seed=0, dtype=torch.float32):
    """Draws a model, saves it in shards, and returns it."""
    torch.manual_seed(seed)
    config = transformers_config(stored)
    with quiet():
        whole = causal_model_class(config)._from_config(config, dtype=dtype)
        whole.save_pretrained(folder, max_shard_size=shard)
    return whole


def their_gradients(whole, ids_BW, microbatches):
    """Loss and gradients that transformers' own model has for a batch, in micro-batches."""
    losses = []
    for ids in ids_BW.chunk(microbatches):
        logits = whole(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").mean()
        loss.backward()
        losses.append(loss.item())
    gradients = {name: p.grad / microbatches for name, p in whole.named_parameters() if p.grad is not None}
    return sum(losses) / microbatches, gradients
