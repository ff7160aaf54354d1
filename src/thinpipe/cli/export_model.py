"""`thinpipe export`: writes a trained model as a Hugging Face folder with tokenizer and model card.

A subspace model is exported as the equivalent dense model. A model with boundary projections has no dense equivalent:
its export includes the code that transformers needs to run it.
"""

import logging
import tomllib
from pathlib import Path

from thinpipe.checkpoint import Checkpoint, find_checkpoint, load_model, run_folder_of
from thinpipe.checkpoint.state import pipeline_config_of
from thinpipe.config.commands import ExportConfig
from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import from_table
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.data import Tokenizer
from thinpipe.models import Model, ModelConfig
from thinpipe.models.hf import projection as projection_export
from thinpipe.models.hf import weights
from thinpipe.models.to_dense import to_dense

_LOG = logging.getLogger(__name__)


def run(config: ExportConfig) -> int:
    if config.output.exists() and not config.output.is_dir():
        raise UserError(f"{config.output} is a file: name a folder")
    if config.output.exists() and any(config.output.iterdir()) and not config.overwrite:
        raise UserError(f"{config.output} is not empty: choose another folder, or pass --overwrite")
    checkpoint = find_checkpoint(config.run)
    described = pipeline_config_of(checkpoint)
    for weights_file in config.output.glob("*.safetensors*"):  # only with --overwrite: files of another export
        weights_file.unlink()
    if isinstance(described, HuggingFaceModelConfig):
        from thinpipe.cli.export_huggingface import export  # transformers takes seconds to import

        return export(checkpoint, described, config)
    if config.merge:
        raise UserError("--merge is for a Hugging Face model that was trained with [lora]: leave it out")
    model = load_model(checkpoint)
    assert isinstance(model, Model)
    tokenizer_folder = run_folder_of(checkpoint) / "tokenizer"
    tokenizer = Tokenizer.load(tokenizer_folder) if tokenizer_folder.is_dir() else None
    end_of_text_id = tokenizer.vocabulary.end_of_text_id if tokenizer else None
    has_projection = model.config.has_projection
    exported = model if has_projection else to_dense(model)
    (projection_export if has_projection else weights).save(exported, config.output, end_of_text_id=end_of_text_id)
    if tokenizer is not None:
        tokenizer.save(config.output)
    else:
        _LOG.warning("%s does not exist: %s has no tokenizer", tokenizer_folder, config.output)
    write_atomically(config.output / "README.md", model_card(checkpoint, model).encode())
    parameters = sum(parameter.numel() for parameter in exported.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters())
    factors = f" ({trained:,} were trained; the export multiplies the subspace's factors out)"
    explained = "" if trained == parameters else factors
    print(f"{config.output}: {checkpoint.manifest.family}, {parameters:,} parameters{explained}")
    if has_projection:
        print(
            f"  a model with boundary projections needs its own code, which is in the folder "
            f"({projection_export.MODELING_FILE}): load it with trust_remote_code=True"
        )
        if rounds_messages(checkpoint):
            print(
                "  the export computes without the rounding of the run's boundaries, so its outputs differ slightly "
                "from those in training"
            )
    print(f'  AutoModelForCausalLM.from_pretrained("{config.output}"{_trust_argument(model.config)})')
    return 0


def rounds_messages(checkpoint: Checkpoint) -> bool:
    """True if the run rounds or compresses states at its boundaries (not plain fp32). False for an imported model,
    which has no run."""
    if not checkpoint.manifest.run:
        return False
    run = from_table(tomllib.loads(checkpoint.manifest.run), RunConfig, where=str(checkpoint.path))
    return run.boundary.forward != "fp32" or run.boundary.states.kind != "none"


def _trust_argument(config: ModelConfig) -> str:
    return ", trust_remote_code=True" if config.has_projection else ""


def model_card(checkpoint: Checkpoint, model: Model) -> str:
    """Model card (Markdown) of the export: how the model was trained and how to load it."""
    manifest, config = checkpoint.manifest, model.config
    trainable = sum(parameter.numel() for parameter in model.parameters())
    if config.has_projection:
        shape = (
            f"It was trained with boundary projections (`{config.projection.kind}`): a state between two "
            f"segments has {config.projection.width} numbers per token instead of {config.dim}. transformers has no "
            f"such model: `{projection_export.MODELING_FILE}` in this folder has its code, based on transformers' "
            "Llama, and needs `trust_remote_code=True`. This code does not round the states between segments."
        )
    elif config.subspace.width is None:
        shape = "It was trained as an ordinary dense model."
    else:
        shape = (
            f"It was trained as a subspace model (arXiv 2506.01260): what the layers write to the residual stream was "
            f"confined to {config.subspace.width} of {config.dim} dimensions"
            f"{', except after the last boundary' if config.subspace.free_last else ''}, so only {trainable:,} of its "
            "weights were trained. The export multiplies the factors out: the function is the same, the head is untied."
        )
    cuts = (
        f"Boundaries before blocks {', '.join(map(str, config.boundaries))}." if config.boundaries else "No boundaries."
    )
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [thinpipe]
---
# {Path(checkpoint.path).parent.parent.name}

Trained with thinpipe for {manifest.step:,} optimiser steps on {manifest.samples_seen:,} samples ({versions}).
{shape}
{cuts}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER"{_trust_argument(config)})
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER"{_trust_argument(config)})
```

Settings of the run:

```toml
{manifest.run}```
"""
