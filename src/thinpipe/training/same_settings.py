"""Settings that all processes of a run must share, and what may change when a run is resumed."""

import dataclasses
import tomllib

from thinpipe.checkpoint import Checkpoint
from thinpipe.config.model_settings import without_places
from thinpipe.config.run import DataConfig, JobConfig, MetricsConfig, RunConfig
from thinpipe.config.toml import differences, dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.foreign import foreign_table
from thinpipe.training.data_loading import DatasetInfo, refuse_other_data
from thinpipe.transport.collectives import Collectives

_PLACEMENT = ("parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_shares")
_UNLISTED_ON_RESUME = ("job.", "data.", "metrics.", "checkpoint.", "model.hf")
"""Prefixes of settings that change no computed number, so that the `Started` event of a resumed run does not list them.
A hub chooses checkpoint.interval anew for every generation."""


def refuse_other_settings(config: RunConfig, collectives: Collectives, *, has_own_places: bool) -> None:
    """Raises UserError unless this process has the settings of process 0, machine-local settings excepted.

    [checkpoint] is not machine-local: all processes save together, at the same steps. `has_own_places`: see
    `RunEnvironment`.
    """
    settings = _without_local(config)
    if has_own_places:
        settings = dataclasses.replace(settings, model=without_places(settings.model))
    mine = tomllib.loads(dump_toml(settings))
    announced = collectives.broadcast_bytes(dump_toml(settings).encode())
    changed = differences(foreign_table(announced), mine)
    if changed:
        listed = "; ".join(f"{setting} {change}" for setting, change in changed.items())
        raise UserError(
            f"process {collectives.rank} has other settings than process 0 (0 -> {collectives.rank}): "
            f"{listed}. Start all processes with the same settings"
        )


def changes_since(checkpoint: Checkpoint, config: RunConfig, info: DatasetInfo, placed: str) -> list[str]:
    """Settings that differ from those of a checkpoint, without `_UNLISTED_ON_RESUME`; none for the first weights of a
    run. `placed`: who computes what now, in words.

    Raises UserError if the tokens, the sequence length, packing or the seed differ: the saved data cursor would then
    point to other samples.
    """
    if not checkpoint.manifest.step:
        return []
    path = checkpoint.path
    refuse_other_data(checkpoint, info, config.data)
    saved, defaults = tomllib.loads(checkpoint.manifest.run), tomllib.loads(dump_toml(RunConfig()))
    changed = differences(defaults | saved, tomllib.loads(dump_toml(config)))  # a section may be newer than the run
    for setting in ("training.seq_len", "training.packing", "debug.seed"):
        if setting in changed:
            raise UserError(
                f"{setting} has changed since {path} was saved ({changed[setting]}), and it decides which samples "
                "come next: set it back, or start a new run with another job.dump_folder"
            )
    placements = [changed.pop(setting, None) for setting in _PLACEMENT]
    listed = [f"{name} {change}" for name, change in changed.items() if not name.startswith(_UNLISTED_ON_RESUME)]
    return [placed, *listed] if any(placements) else listed


def _without_local(config: RunConfig) -> RunConfig:
    """The settings with those that may differ between machines reset to defaults."""
    return dataclasses.replace(
        config,
        job=JobConfig(),
        data=DataConfig(),
        boundary=dataclasses.replace(config.boundary, store=None),
        training=dataclasses.replace(config.training, device="auto"),
        metrics=MetricsConfig(),
    )
