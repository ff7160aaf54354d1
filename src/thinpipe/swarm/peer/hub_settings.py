"""Which settings of a run a peer takes from its hub: those that decide what is computed, and no others.

The rest is this machine's own: its folders and device, and whatever opens a port, logs somewhere or costs money. The
list names what is taken, so that a new setting stays with the peer until somebody has thought about it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinpipe.config.huggingface_model import HUB_PREFIX
from thinpipe.config.run import JobConfig, RunConfig
from thinpipe.config.toml import from_table, refuse_unknown_keys
from thinpipe.core.foreign import foreign_table

TAKEN: Mapping[str, tuple[str, ...]] = {
    "model": (
        *("preset", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "max_seq_len", "dropout", "tied"),
        *("boundaries", "subspace", "projection", "quantize_base"),
    ),
    "lora": ("r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora"),
    "training": (
        *("steps", "global_batch_size", "seq_len", "packing", "max_norm", "precision", "offload", "check_memory"),
    ),
    "parallelism": (
        *("pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"),
        *("pipeline_parallel_shares", "pipeline_parallel_extra_microbatches", "timeout_seconds"),
    ),
    "optimizer": ("lr", "beta1", "beta2", "eps", "weight_decay", "second_moment", "matrix_lr_factor"),
    "lr_scheduler": ("warmup_steps", "decay_type", "decay_ratio", "min_lr_factor"),
    "basis": ("interval", "step_size"),
    "boundary": ("preset", "method", "forward", "backward", "states", "gradients", "at_inference"),
    "execution": ("checkpoint_activations", "compile"),
    "checkpoint": ("interval", "keep_latest_k", "uplink_share"),
    "validation": ("freq", "steps"),
    "metrics": ("log_freq",),
    "debug": ("seed", "deterministic"),
}
"""By section: settings that a peer takes from its hub."""

_WHERE = "the hub's settings"
_PINNED = re.compile(rf"{HUB_PREFIX}[A-Za-z0-9][\w.-]{{0,95}}(/[A-Za-z0-9][\w.-]{{0,95}})?@[0-9a-f]{{40}}", re.ASCII)
"""A model of the Hugging Face hub at one commit."""


def settings_from_hub(text: str, folder: Path, device: str) -> RunConfig:
    """The settings of the run for this machine. `text`: the hub's, as TOML; `folder`, `device`: this machine's. Raises
    ProtocolError or UserError if they are not valid."""
    table = foreign_table(text)
    refuse_unknown_keys(table, RunConfig, where=_WHERE)  # of a newer hub: it would be computed without them
    model = _section(table, "model")
    taken = {name: _of(_section(table, name), settings) for name, settings in TAKEN.items() if name in table}
    if "initial" in model:  # the hub's folder; the manifest describes the model
        taken.setdefault("model", {})["initial"] = str(folder)
    if "hf" in model:  # likewise; the manifest has the base's hash
        taken.setdefault("model", {})["hf"] = str(base_folder(folder))
    config = from_table(taken, RunConfig, where=_WHERE)
    return replace(config, job=JobConfig(dump_folder=folder), training=replace(config.training, device=device))


def base_folder(folder: Path) -> Path:
    """Folder of what a peer has of the base of a Hugging Face model. `folder`: the peer's."""
    return folder / "base"


def model_on_a_hub(text: str) -> str:
    """The model of the Hugging Face hub from which the run's base comes, as hf:NAME@COMMIT; empty if it comes from a
    folder, or if the hub's settings (`text`) do not pin it to a commit."""
    named = _section(foreign_table(text), "model").get("hf")
    return named if isinstance(named, str) and _PINNED.fullmatch(named) else ""


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = table.get(name, {})
    return section if isinstance(section, dict) else {}


def _of(section: Mapping[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name in settings}
