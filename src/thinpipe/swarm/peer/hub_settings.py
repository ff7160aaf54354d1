"""Which settings of a run a peer takes from its hub: those that decide what is computed, and no others.

The rest is this machine's own: its folders and device, and whatever opens a port, logs somewhere or costs money. The
list names what is taken, so that a new setting stays with the peer until somebody has thought about it.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinpipe.config.run import JobConfig, RunConfig
from thinpipe.config.toml import from_table, refuse_unknown_keys
from thinpipe.core.foreign import foreign_table

TAKEN: Mapping[str, tuple[str, ...]] = {
    "model": (
        *("preset", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "max_seq_len", "dropout", "tied"),
        *("boundaries", "subspace", "projection"),
    ),
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


def settings_from_hub(text: str, folder: Path, device: str) -> RunConfig:
    """The settings of the run for this machine. `text`: the hub's, as TOML; `folder`, `device`: this machine's. Raises
    ProtocolError or UserError if they are not valid."""
    table = foreign_table(text)
    refuse_unknown_keys(table, RunConfig, where=_WHERE)  # of a newer hub: it would be computed without them
    begins_from_checkpoint = "initial" in _section(table, "model")
    taken = {name: _of(_section(table, name), settings) for name, settings in TAKEN.items()}
    if begins_from_checkpoint:  # the hub's folder; the manifest describes the model
        taken["model"]["initial"] = str(folder)
    config = from_table(taken, RunConfig, where=_WHERE)
    return replace(config, job=JobConfig(dump_folder=folder), training=replace(config.training, device=device))


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = table.get(name, {})
    return section if isinstance(section, dict) else {}


def _of(section: Mapping[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name in settings}
