"""A Llama with necks as a Hugging Face folder, which carries the code that transformers needs to run it.

It is no plain Llama, so nothing folds: the folder has `modeling_thinpipe.py`, and whoever loads it has to trust it.
transformers is not imported here.
"""

import shutil
from pathlib import Path
from typing import Any

from thinpipe.core.errors import UserError
from thinpipe.models.config import LlamaConfig, ModelConfig
from thinpipe.models.huggingface import NAMES, SHARD_BYTES, Names, write_folder
from thinpipe.models.huggingface_config import NECK_MODEL_TYPE, stored_config
from thinpipe.models.model import Model

MODELING = "modeling_thinpipe.py"


def save(
    model: Model, folder: str | Path, max_shard_bytes: int = SHARD_BYTES, end_of_text_id: int | None = None
) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` loads.

    What crosses a boundary crosses whole there, as in a `Model`: rounding of messages is a matter of a run.
    """
    folder, config = Path(folder), model.config
    if not config.has_neck:
        raise TypeError("this model has no neck: it can be saved as a plain one")
    if not isinstance(config, LlamaConfig):
        raise UserError(
            f"a {config.family} with a neck cannot be exported, only a Llama: use `thinpipe generate` and `thinpipe "
            "eval`, which take the run itself, or train a llama preset"
        )
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name(MODELING), folder / MODELING)
    write_folder(model, folder, neck_names(config), neck_config(config, end_of_text_id), max_shard_bytes)


def neck_names(config: ModelConfig) -> Names:
    """Those of a Llama; an exit and the entry behind it are parts of the block after the boundary."""
    beginnings = dict(NAMES[LlamaConfig].beginnings)
    # Two linear layers there: an exit's weight is K x D, an entry's D x K.
    ours, theirs = ("columns_DK", "weight") if config.neck.kind == "learned" else ("", "")
    for segment, block in enumerate(config.boundaries):
        boundary = f"model.layers.{block}.boundary"
        beginnings[f"necks.{segment}.exit.{ours}"] = f"{boundary}.exit.{theirs}"
        beginnings[f"necks.{segment + 1}.entry.{ours}"] = f"{boundary}.entry.{theirs}"
        beginnings[f"necks.{segment + 1}.anchors."] = f"{boundary}.anchors."
    return Names("first.embed_tokens.weight", "model.", beginnings, transposed=("exit.columns_DK",))


def neck_config(config: ModelConfig, end_of_text_id: int | None = None) -> dict[str, Any]:
    """The content of config.json: a Llama's, the necks, and where the code is."""
    neck, module = config.neck, Path(MODELING).stem
    assert neck.width is not None
    return {
        **stored_config(config, end_of_text_id),
        "model_type": NECK_MODEL_TYPE,
        "architectures": ["ThinpipeForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.ThinpipeConfig",
            "AutoModel": f"{module}.ThinpipeModel",
            "AutoModelForCausalLM": f"{module}.ThinpipeForCausalLM",
        },
        "boundaries": list(config.boundaries),
        "neck_kind": neck.kind,
        "neck_width": neck.width,
        "neck_hidden": (neck.hidden or 2 * neck.width) if neck.kind == "bottleneck" else 0,
        "first_rank": neck.first_rank,
        "anchor_rank": neck.anchor_rank,
        "anchor_reach": neck.anchor_reach,
        "ngram_rows": neck.ngram_rows,
        "ngram_rank": neck.ngram_rank,
    }
