"""LoRA adapters in segments against peft's on the whole model, for the probe."""

import copy
import warnings
from dataclasses import replace

import torch
import torch.nn.functional as F
from peft import get_peft_model

from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.models.hf.layer_plan import UnsupportedModelError
from thinpipe.models.hf.lora import peft_config
from thinpipe.models.hf.probe_trial import Trial, backward, materialised, require_equal

_LORA = LoraConfig(r=4, lora_alpha=8)
_PEFT_PREFIX = "base_model.model."


def compare_adapters(trial: Trial) -> int:
    """Number of adapters' parameters compared. Raises UnsupportedModelError for the first that differs."""
    model = materialised(replace(trial.model.config, lora=_LORA))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_peft_model(copy.deepcopy(trial.whole), peft_config(_LORA)).train()
    wanted = {name.removeprefix(_PEFT_PREFIX): p for name, p in theirs.named_parameters() if p.requires_grad}
    own = {
        segment.huggingface_name(name): parameter
        for segment in model.segments
        for name, parameter in segment.named_parameters()
        if parameter.requires_grad
    }
    if different := sorted(set(own) ^ set(wanted)):
        raise UnsupportedModelError(f"{different[0]} is an adapter in segments or in the whole model only")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in own.items():  # also those that begin as zeros, so that every gradient is tried
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            wanted[name].copy_(parameter)
    backward(model, trial.ids)
    logits = theirs(input_ids=trial.ids[:, :-1], use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1).float(), trial.ids[:, 1:].flatten(), reduction="none").mean().backward()
    for name, parameter in wanted.items():
        found, expected = own[name].grad, parameter.grad
        if found is None and expected is None:  # what the model does not use for this text
            continue
        if found is None or expected is None:
            place = "in its segment" if found is None else "in the whole model, and one in its segment"
            raise UnsupportedModelError(f"{name} has no gradient {place}")
        require_equal(f"the gradient of {name}", found, expected)
    return len(wanted)
