"""`thinpipe export` of a run that trained a Hugging Face model: the whole model, its adapter, or both merged."""

from torch import Tensor

from thinpipe.checkpoint import Checkpoint, load_model
from thinpipe.checkpoint.load import weights_dtype
from thinpipe.config.commands import ExportConfig
from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.models.hf.decoder import HuggingFaceModel
from thinpipe.models.hf.export import copy_tokenizer, save_merged, save_whole
from thinpipe.models.hf.lora import save_adapter
from thinpipe.models.hf.merging import stores_transposed
from thinpipe.models.protocol import trainable_parameters


def export(checkpoint: Checkpoint, model: HuggingFaceModelConfig, config: ExportConfig) -> int:
    """Writes the folder that `config` asks for, with a model card. Raises UserError."""
    if config.merge and model.lora is None:
        raise UserError("--merge is for a run with [lora]: all weights of this one were trained, leave it out")
    opened = f'AutoModelForCausalLM.from_pretrained("{config.output}")'
    if model.lora is None:
        whole = load_model(checkpoint)
        assert isinstance(whole, HuggingFaceModel)
        save_whole(whole, config.output)
    elif config.merge:
        save_merged(model, adapters_of(checkpoint, model), config.output, weights_dtype(checkpoint))
    else:
        adapted = HuggingFaceModel(model)
        is_transposed = stores_transposed(adapted) and model.quantize_base is None
        save_adapter(adapted, adapters_of(checkpoint, model), config.output, fan_in_fan_out=is_transposed)
        copy_tokenizer(model.source, config.output)
        opened = f'PeftModel.from_pretrained(base, "{config.output}")  # base: {model.source}'
    write_atomically(config.output / "README.md", model_card(checkpoint, model, merged=config.merge).encode())
    print(f"{config.output}: {model.stored['model_type']}, {_contents(model, merged=config.merge)}\n  {opened}")
    return 0


def adapters_of(checkpoint: Checkpoint, config: HuggingFaceModelConfig) -> dict[str, Tensor]:
    """The adapters of a checkpoint by their names in transformers; nothing is read of the base."""
    model = HuggingFaceModel(config)
    plan = model.segments[0].plan
    saved = {name: tensor for layer in _layers(checkpoint) for name, tensor in checkpoint.layer(layer).items()}
    return {plan.huggingface_name(name): saved[name] for name in trainable_parameters(model)}


def _layers(checkpoint: Checkpoint) -> list[str]:
    return [file.removesuffix(".safetensors") for file in checkpoint.manifest.files if not file.startswith("boundary.")]


def _contents(model: HuggingFaceModelConfig, *, merged: bool) -> str:
    if model.lora is None:
        return "all weights"
    return "base and adapters merged" if merged else "the adapter alone"


def model_card(checkpoint: Checkpoint, model: HuggingFaceModelConfig, *, merged: bool) -> str:
    """Model card (Markdown): what was trained, how, and on which base."""
    manifest = checkpoint.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    quantised = f" in {model.quantize_base}" if model.quantize_base else ""
    how = (
        "All weights were trained." if model.lora is None else f"Low-rank adapters were trained on the base{quantised}."
    )
    library = "peft" if model.lora is not None and not merged else "transformers"
    return f"""---
library_name: {library}
pipeline_tag: text-generation
tags: [thinpipe]
---
# {checkpoint.path.parent.parent.name}

Trained with thinpipe for {manifest.step:,} optimiser steps on {manifest.samples_seen:,} samples ({versions}).
{how} This folder has {_contents(model, merged=merged)}. The base's tensors have the sha256 {model.base_sha256}.

Settings of the run:

```toml
{manifest.run}```
"""
