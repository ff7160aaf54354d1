"""LoRA adapters in the segments of a Hugging Face model, by the library peft: its layers, names and files.

peft draws first values from the generator of the process, so they would depend on the placement; here they come from
the seed and the parameter's name. Adapters are float32 whatever the precision of the frozen weights.
"""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.device.counter_random import uniform
from thinpipe.models.hf.layer_plan import LayerPlan, UnsupportedModelError
from thinpipe.models.hf.model_hub import HubModel

if TYPE_CHECKING:
    from thinpipe.models.hf.decoder import HuggingFaceModel

_ADAPTER = "default"
_PREFIX = "base_model.model."
"""What peft puts before the names of a model in an adapter's file."""


def peft_config(lora: LoraConfig) -> peft.LoraConfig:
    """peft's own configuration of these adapters."""
    targets = lora.target_modules
    return peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # type: ignore[arg-type]
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
    )


def add_adapters(model: Any, plan: LayerPlan, lora: LoraConfig) -> peft.LoraConfig:
    """Freezes a causal language model, whole or with the layers of a segment, and gives its blocks adapters. What peft
    has made of the configuration: the modules that "all-linear" came to, and experts that are one parameter.

    On the meta device; elsewhere `draw_adapters` is to be called next. Raises UnsupportedModelError if an adapter would
    be outside of the blocks, or if there would be none.
    """
    model.requires_grad_(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has seen how a layer stores its matrix
            peft.inject_adapter_in_model(peft_config(lora), model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise UnsupportedModelError(f"peft does not adapt these blocks: {error}") from error
    for name, parameter in model.named_parameters():
        is_adapter = f".lora_A.{_ADAPTER}." in name or f".lora_B.{_ADAPTER}." in name
        parameter.requires_grad_(is_adapter)
        if is_adapter and not name.startswith(f"{plan.blocks}."):
            raise UnsupportedModelError(
                f"{name} would be an adapter outside of the blocks: leave it out of target_modules"
            )
        if is_adapter:
            parameter.data = parameter.data.float()
    made: peft.LoraConfig = model.peft_config[_ADAPTER]
    return made


@torch.no_grad()
def draw_adapters(named: Mapping[str, nn.Parameter], seed: int) -> None:
    """First values of adapters, by their names in transformers: as in peft, A uniform between -1 / sqrt(inputs) and
    1 / sqrt(inputs), and B zero."""
    for name, parameter in named.items():
        if f".lora_A.{_ADAPTER}." in name:
            bound = parameter.shape[1] ** -0.5
            parameter.copy_((uniform(parameter, seed, "lora", name) * 2 - 1) * bound)
        else:
            parameter.zero_()


def save_adapter(
    model: "HuggingFaceModel", adapters: Mapping[str, Tensor], folder: Path, *, fan_in_fan_out: bool = False
) -> None:
    """Writes a folder that `PeftModel.from_pretrained` opens. `adapters`: those of all segments, by their names in
    transformers; `fan_in_fan_out`: whether the base stores their matrices as inputs x outputs."""
    assert model.adapter_config is not None
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        _PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor.detach().cpu().contiguous()
        for name, tensor in adapters.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    source, described = model.config.source, copy.deepcopy(model.adapter_config)
    hub = HubModel.of(source)
    described.base_model_name_or_path = source if hub is None else hub.name
    described.revision = None if hub is None else hub.revision
    described.inference_mode, described.fan_in_fan_out = True, fan_in_fan_out
    if not isinstance(described.target_modules, str):
        described.target_modules = sorted({name.rsplit(".", 1)[-1] for name in described.target_modules or ()})
    described.save_pretrained(str(folder))
