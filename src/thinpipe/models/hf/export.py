"""Writes a trained Hugging Face model as transformers and peft open it: whole, as an adapter, or merged with its base.

config.json and the tokenizer are the base's own. config.json is written last: an incomplete folder does not load.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.core.files import write_atomically
from thinpipe.models.hf.base_files import base_file
from thinpipe.models.hf.base_tensors import open_tensors
from thinpipe.models.hf.blocks import OwnBlock
from thinpipe.models.hf.config import CONFIG, INDEX, SINGLE_FILE
from thinpipe.models.hf.decoder import HuggingFaceModel
from thinpipe.models.hf.hollow import quiet
from thinpipe.models.hf.merging import Merging
from thinpipe.models.hf.model_of_run import TOKENIZER_FILES

SHARD_NBYTES = 2_000_000_000
"""Largest file of weights, and so about the memory that merging needs."""
_GENERATION = "generation_config.json"


def save_whole(model: HuggingFaceModel, folder: Path) -> None:
    """Writes a model that is in one segment as a folder that `AutoModelForCausalLM.from_pretrained` opens."""
    [segment] = model.segments
    whole = segment.whole
    blocks = whole.get_submodule(segment.plan.blocks)
    for index, block in enumerate(blocks):
        blocks[index] = block.block if isinstance(block, OwnBlock) else block
    if model.config.is_untied:
        whole.all_tied_weights_keys, whole.config.tie_word_embeddings = {}, False
    with quiet():
        whole.save_pretrained(folder, max_shard_size=SHARD_NBYTES)
    dtype = next(model.parameters()).dtype
    write_config(model.config, folder, dtype)


def save_merged(
    config: HuggingFaceModelConfig, adapters: Mapping[str, Tensor], folder: Path, dtype: torch.dtype
) -> None:
    """Writes the base with its adapters added to its matrices, one file of weights after the other: it needs the memory
    of one file. A quantised base is written as the run saw it, with its matrices rounded to what 4 or 8 bits hold.

    `adapters`: by their names in transformers; `dtype`: data type of the run's weights. Raises UserError.
    """
    merging = Merging.of(config, adapters, dtype)
    stored = open_tensors(config.source)
    folder.mkdir(parents=True, exist_ok=True)
    _write_shards(
        {name: stored.nbytes(name) for name in stored.names}, lambda name: merging.merged(name, stored), folder
    )
    merging.refuse_unused()
    write_config(config, folder, None)


def write_config(config: HuggingFaceModelConfig, folder: Path, dtype: torch.dtype | None) -> None:
    """Copies the base's tokenizer and its settings of generation, and writes its config.json, with what has changed.
    `dtype`: data type of the weights; None: the base's."""
    copy_tokenizer(config.source, folder)
    content = dict(config.stored)
    if dtype is not None:
        key = next((key for key in ("dtype", "torch_dtype") if key in content), "torch_dtype")
        content[key] = str(dtype).removeprefix("torch.")
        content |= {"tie_word_embeddings": False} if config.is_untied else {}
    write_atomically(folder / CONFIG, (json.dumps(content, indent=2) + "\n").encode())


def copy_tokenizer(source: str, folder: Path) -> None:
    """Copies the base's tokenizer byte for byte, and its settings of generation."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*TOKENIZER_FILES, _GENERATION):
        found = base_file(source, name)
        if found is not None:
            shutil.copyfile(found, folder / name)


def _write_shards(nbytes: Mapping[str, int], read: Callable[[str], Tensor], folder: Path) -> None:
    shards = list(_shards(nbytes))
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: read(name) for name in names}, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": file_of}
        write_atomically(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _shards(nbytes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in order, in groups of at most `SHARD_NBYTES`, unless a single tensor is larger."""
    names, size = list[str](), 0
    for name, own in nbytes.items():
        if names and size + own > SHARD_NBYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names
