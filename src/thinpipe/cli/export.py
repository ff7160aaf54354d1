"""`thinpipe export`: a trained model as a plain Hugging Face folder with tokenizer and model card."""

from pathlib import Path

from thinpipe.checkpoint import Checkpoint, find_checkpoint, load_model, run_folder_of
from thinpipe.cli.settings import ExportConfig
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.data import Tokenizer
from thinpipe.models import Model, huggingface
from thinpipe.models.fold import fold


def run(config: ExportConfig) -> int:
    if config.output.exists() and any(config.output.iterdir()):
        raise UserError(f"{config.output} is not empty: name another folder")
    checkpoint = find_checkpoint(config.run)
    model = load_model(checkpoint)
    folded = fold(model)
    tokenizer_folder = run_folder_of(checkpoint) / "tokenizer"
    tokenizer = Tokenizer.load(tokenizer_folder) if tokenizer_folder.is_dir() else None
    huggingface.save(folded, config.output, end_of_text_id=tokenizer.vocabulary.end_of_text_id if tokenizer else None)
    if tokenizer is not None:
        tokenizer.save(config.output)
    write_atomically(config.output / "README.md", model_card(checkpoint, model).encode())
    parameters = sum(parameter.numel() for parameter in folded.parameters())
    print(f"{config.output}: {checkpoint.manifest.family}, {parameters:,} parameters")
    print(f'  AutoModelForCausalLM.from_pretrained("{config.output}")')
    return 0


def model_card(checkpoint: Checkpoint, model: Model) -> str:
    """How the model came to be, for whoever finds the folder."""
    manifest, config = checkpoint.manifest, model.config
    trainable = sum(parameter.numel() for parameter in model.parameters())
    if config.subspace.width is None:
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

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
```

Settings of the run:

```toml
{manifest.run}```
"""
