"""Shapes of a Hugging Face model's tensors from its config.json alone: transformers builds it without memory."""

from collections.abc import Mapping
from typing import Any

import torch

from thinpipe.models.hf.hollow import build_on_meta
from thinpipe.models.hf.layer_plan import find_plan
from thinpipe.models.hf.pretrained_config import transformers_config


def base_shapes(stored: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, a tied head left out. Raises UserError for a model that cannot be cut."""
    config = transformers_config(stored)
    whole = build_on_meta(config, torch.float32)
    find_plan(whole)
    head = whole.get_output_embeddings()
    tied = head.weight if head is not None and getattr(config, "tie_word_embeddings", False) else None
    return [(name, tuple(parameter.shape)) for name, parameter in whole.named_parameters() if parameter is not tied]
