"""Exports a Llama with a boundary projection as a Hugging Face folder with its own modeling code.

Such a model cannot be converted to a plain Llama: the folder contains `modeling_thinpipe.py`, and loading it needs
`trust_remote_code=True`. transformers is not imported here.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinpipe.config.families.llama import LLAMA
from thinpipe.config.model import ModelConfig
from thinpipe.core.errors import UserError
from thinpipe.models.hf.config import PROJECTION_MODEL_TYPE, hf_config
from thinpipe.models.hf.weights import SHARD_BYTES, ParameterNames, parameter_names, write_folder
from thinpipe.models.model import Model

MODELING_FILE = "modeling_thinpipe.py"


def save(
    model: Model, folder: str | Path, max_shard_bytes: int = SHARD_BYTES, end_of_text_id: int | None = None
) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` loads.

    The exported model does not round or compress boundary messages, like a `Model`: that belongs to a run's [boundary].
    Raises UserError for a model that is not a Llama.
    """
    folder, config = Path(folder), model.config
    if not config.has_projection:
        raise TypeError("this model has no boundary projection: it can be saved as a plain one")
    if config.spec is not LLAMA:
        raise UserError(
            f"a {config.family} with a boundary projection cannot be exported, only a Llama: use `thinpipe generate` "
            "and `thinpipe eval`, which take the run itself, or train a llama preset"
        )
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name(MODELING_FILE), folder / MODELING_FILE)
    write_folder(model, folder, projection_names(config), projection_config(config, end_of_text_id), max_shard_bytes)


def projection_names(config: ModelConfig) -> ParameterNames:
    """Hugging Face parameter names: a Llama's, plus the projections of each boundary, which belong to the block after
    the boundary."""
    names = parameter_names(config.spec)
    prefixes = dict(names.prefixes)
    # Learned projections are nn.Linear layers there: the down projection's weight is K x D, the up projection's D x K.
    ours, theirs = ("columns_DK", "weight") if config.projection.kind == "learned" else ("", "")
    for segment, block in enumerate(config.boundaries):
        boundary = f"model.layers.{block}.boundary"
        prefixes[f"projections.{segment}.down_projection.{ours}"] = f"{boundary}.down_projection.{theirs}"
        prefixes[f"projections.{segment + 1}.up_projection.{ours}"] = f"{boundary}.up_projection.{theirs}"
        prefixes[f"projections.{segment + 1}.token_prior."] = f"{boundary}.token_prior."
    return replace(names, prefixes=prefixes, transposed=("down_projection.columns_DK",))


def projection_config(config: ModelConfig, end_of_text_id: int | None = None) -> dict[str, Any]:
    """Content of config.json: a Llama's keys, the boundary projection, and the modeling code (auto_map)."""
    projection, module = config.projection, Path(MODELING_FILE).stem
    assert projection.width is not None
    return {
        **hf_config(config, end_of_text_id),
        "model_type": PROJECTION_MODEL_TYPE,
        "architectures": ["ThinpipeForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.ThinpipeConfig",
            "AutoModel": f"{module}.ThinpipeModel",
            "AutoModelForCausalLM": f"{module}.ThinpipeForCausalLM",
        },
        "boundaries": list(config.boundaries),
        "projection_kind": projection.kind,
        "projection_width": projection.width,
        "projection_hidden": (projection.hidden or 2 * projection.width) if projection.kind == "bottleneck" else 0,
        "embedding_rank": projection.embedding_rank,
        "token_prior_rank": projection.token_prior_rank,
        "token_prior_window": projection.token_prior_window,
        "bigram_rows": projection.bigram_rows,
        "bigram_rank": projection.bigram_rank,
    }
