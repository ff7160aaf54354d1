"""Which settings a hub's run may have, and which of them its peers are sent."""

from collections.abc import Sequence
from dataclasses import replace

from thinpipe.config.huggingface_model import HUB_PREFIX
from thinpipe.config.run import DataConfig, JobConfig, MetricsConfig, RunConfig
from thinpipe.core.errors import UserError
from thinpipe.training.data_loading import token_dtype

_ONE_STAGE_SCHEDULES = ("GPipe", "1F1B")
_MAX_ANSWER_NBYTES = 8_000_000
"""Maximum size of a reply with token ids, in bytes: one message."""


def settings_for_peers(config: RunConfig, shares: Sequence[int] = (1,), interval: int | None = None) -> RunConfig:
    """Settings sent to peers, without the hub's own folders, live page and metric sinks. `shares`: segments per peer;
    `interval`: steps between commits."""
    parallelism = replace(
        config.parallelism, pipeline_parallel_degree=len(shares), pipeline_parallel_shares=tuple(shares)
    )
    checkpoint = replace(config.checkpoint, interval=interval or config.checkpoint.interval)
    hf = config.model.hf
    is_folder = hf is not None and not hf.startswith(HUB_PREFIX)
    return replace(
        config,
        job=JobConfig(),
        data=DataConfig(),
        model=replace(config.model, hf="base" if is_folder else hf),
        parallelism=parallelism,
        checkpoint=checkpoint,
        metrics=MetricsConfig(log_freq=config.metrics.log_freq),
    )


def refuse_large_batches(config: RunConfig, vocab_size: int, *, chats: bool = False) -> None:
    """Raises UserError if the token ids of a batch do not fit into one message."""
    training = config.training
    nbytes = training.global_batch_size * (training.seq_len + 1) * token_dtype(vocab_size, chats=chats).itemsize
    if nbytes > _MAX_ANSWER_NBYTES:
        raise UserError(
            f"the token ids of a batch take {nbytes} bytes, and a hub can send at most {_MAX_ANSWER_NBYTES}: lower "
            "training.global_batch_size or training.seq_len"
        )


def reject_unused_settings(config: RunConfig) -> None:
    """Raises UserError for settings that a hub cannot honour."""
    schedule = config.parallelism.pipeline_parallel_schedule
    if schedule not in _ONE_STAGE_SCHEDULES:
        raise UserError(
            f"a hub assigns consecutive segments to each peer, and {schedule} needs two stages per process: "
            f"set parallelism.pipeline_parallel_schedule to {' or '.join(_ONE_STAGE_SCHEDULES)}"
        )
    if config.rounds.steps:
        raise UserError(
            "a hub's peers take all steps together in this version: leave [rounds] out; `thinpipe train` computes "
            "rounds in one process"
        )
    if config.link.is_shaped:
        raise UserError("peers use their real links: remove [link], which emulates links between local processes")
    if config.boundary.store is not None:
        raise UserError("boundary.store is a folder on one machine, which peers do not share: remove it")
