"""Checks of a run on this machine: tokens and their hashes, disk space for checkpoints, memory, metric extras, the port
of its hub."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, find_checkpoint, model_config_of
from thinpipe.checkpoint.state import pipeline_config_of
from thinpipe.config.model import ModelConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import from_table
from thinpipe.core.errors import UserError
from thinpipe.core.extras import install_hint
from thinpipe.core.run_folder import checkpoints_path
from thinpipe.core.units import format_bytes
from thinpipe.data import Tokens, has_tokens, progress_bar
from thinpipe.device.choice import choose_device
from thinpipe.doctor.base import base_findings, base_problem, find_base
from thinpipe.doctor.disk_and_port import disk_finding
from thinpipe.doctor.finding import Finding, not_checked, ok, problem, warning
from thinpipe.doctor.machine import missing_extras
from thinpipe.models.hf.base_tensors import PeerBase
from thinpipe.planning.partition import SegmentNeeds
from thinpipe.planning.segment_costs import segment_costs, segment_needs, shared_nbytes
from thinpipe.planning.stored_model import PlannedModel, StoredModel
from thinpipe.swarm.peer.hub_settings import base_folder
from thinpipe.training.data_loading import DatasetInfo, LocalTokens
from thinpipe.training.memory_check import device_budget, local_fit

_SHOWN_BY_EXTRAS = ("dashboard", "prometheus", "tensorboard", "wandb")
"""Settings of `metrics` that need the extra of the same name."""


def run_findings(config: RunConfig, *, keep_ends: Sequence[str] = ()) -> list[Finding]:
    """`keep_ends`: machines of the hub's owner, which alone compute the first and the last segment."""
    sizes = _size_findings(config) if config.model.hf is None else _published_findings(config, keep_ends)
    return [*sizes, *_metrics(config)]


def _published_findings(config: RunConfig, keep_ends: Sequence[str]) -> list[Finding]:
    """Findings for a run that trains a Hugging Face model."""
    data, dataset_info = _data(config)
    try:
        base = find_base(config, dataset_info)
    except UserError as error:
        return [data, base_problem(error)]
    newest = CheckpointFolder(checkpoints_path(config.job.dump_folder)).newest_complete(layers=())[0]
    chats = dataset_info is not None and dataset_info.chats
    of_base = base_findings(config, base, newest, chats=chats, keep_ends=keep_ends)
    return [data, *of_base, disk_finding(config, base.shapes), _memory(config, base.shapes)]


def _size_findings(config: RunConfig) -> list[Finding]:
    data, dataset_info = _data(config)
    try:
        model = _model(config, dataset_info)
    except UserError as error:
        return [data, problem("model", str(error), "Correct the run's settings.")]
    if model is None:
        why = "the size of the model depends on the vocabulary of the tokens"
        return [data, disk_finding(config, None), not_checked("memory", why)]
    return [data, disk_finding(config, model), _memory(config, model)]


def _metrics(config: RunConfig) -> list[Finding]:
    """Finding for the dashboard and the exporters that the run enables; none if it enables none."""
    values = {name: getattr(config.metrics, name) for name in _SHOWN_BY_EXTRAS}
    asked = [name for name, value in values.items() if value is not None and value is not False]  # port 0 is enabled
    missing = missing_extras(asked)
    if not missing:
        return [ok("metrics", ", ".join(asked))] if asked else []
    settings = " and ".join(f"metrics.{name}" for name in missing)
    fix = f"Leave {settings} out, or run {install_hint(','.join(missing))}."
    return [problem("metrics", f"{settings} is set, but the library for it is not installed", fix)]


def _data(config: RunConfig) -> tuple[Finding, DatasetInfo | None]:
    words = config.data.in_words
    try:
        dataset_info = LocalTokens(config).dataset_info
    except (UserError, OSError) as error:
        fix = f"Make the tokens with `thinpipe tokenize --output {config.data.folders[0]}`, or set data.path."
        if config.data.mixture:
            fix = "Make the tokens of all folders with `thinpipe tokenize` and one tokenizer, or set data.mixture."
        return problem("data", str(error), fix), None
    newest = CheckpointFolder(checkpoints_path(config.job.dump_folder)).newest_complete(layers=())[0]
    if newest is not None and newest.manifest.data_sha256 not in ("", dataset_info.sha256):
        return problem(
            "data",
            f"{words} has other tokens than {newest.path} was trained on",
            "Set [data] to those tokens, or job.dump_folder to a new folder.",
        ), dataset_info
    try:
        for path in config.data.folders:
            _verify_tokens(path)
    except (UserError, OSError) as error:
        return problem("data", str(error), "Replace the file: a run would train on damaged text."), dataset_info
    validated = "with validation text" if dataset_info.validation_batches else "without validation text"
    text = f"{words}: a vocabulary of {dataset_info.vocab_size:,}, {validated}; every file has its recorded sha256"
    return ok("data", text), dataset_info


def _verify_tokens(path: Path) -> None:
    """Compares every token shard in `path` with its recorded hash, with a progress bar. Raises DataError for the first
    that differs."""
    for side in ("train", "validation"):
        if has_tokens(path / side):
            Tokens(path / side).verify(progress_bar)


def _model(config: RunConfig, dataset_info: DatasetInfo | None) -> ModelConfig | None:
    if config.model.initial is not None:
        return model_config_of(find_checkpoint(config.model.initial, layers=()))
    return None if dataset_info is None else config.model.resolve(dataset_info.vocab_size)


def _memory(config: RunConfig, model: PlannedModel) -> Finding:
    """Compares the memory of this machine with that of the whole run, as `thinpipe train` runs all of it here; a run of
    several machines must have room here for its largest segment."""
    try:
        here, fit = local_fit(config, model, choose_device(config.training.device))
        text, need = fit.describe_need(here), fit.judge(here)
    except UserError as error:
        return problem("memory", str(error), "Correct the run's settings.")
    needs = segment_needs(segment_costs(model, here), here)
    largest = max(fit.budget.device_nbytes(each) for each in needs) + shared_nbytes(model, here)
    if len(needs) > 1:
        text += f". Its largest segment alone needs {format_bytes(largest)}"
    if need.fits:
        return ok("memory", text)
    fix = f"To make it fit: {'; '.join(fit.advice(here))}."
    return (problem if largest > fit.budget.usable_nbytes else warning)("memory", text, fix)


def assigned_memory_finding(folder: Path, segments: int, device: str) -> Finding:
    """Compares the memory of this machine with what its segments need. Only the number of segments is known, so the
    most demanding run of that many consecutive segments counts."""
    newest = CheckpointFolder(checkpoints_path(folder)).newest_complete(layers=())[0]
    if newest is None or not segments:
        return not_checked("memory", "the hub has not assigned segments to this machine yet")
    config = from_table(tomllib.loads(newest.manifest.run), RunConfig, where=str(newest.path))
    budget = device_budget(choose_device(device))
    try:
        of_segments, shared = _needs(newest, config, folder)
    except UserError as error:  # the base of a Hugging Face model is not described here yet
        return not_checked("memory", str(error))
    needs = [budget.device_nbytes(need) for need in of_segments]
    spans = [sum(needs[start : start + segments]) for start in range(len(needs) - segments + 1)]
    wanted = max(spans, default=sum(needs)) + shared
    usable = budget.offered_nbytes()
    text = f"{format_bytes(usable)} of memory usable; {segments} segment(s) need {format_bytes(wanted)}"
    if wanted > usable:
        return problem(
            "memory", text, "Close other programs, or join with --memory so that the hub assigns fewer segments."
        )
    return ok("memory", text)


def _needs(newest: Checkpoint, config: RunConfig, folder: Path) -> tuple[list[SegmentNeeds], int]:
    """Needs of every segment, and bytes that they share. `folder`: of a peer. Raises UserError."""
    found = pipeline_config_of(newest)
    if isinstance(found, ModelConfig):
        model: PlannedModel = found
    else:
        tensors = PeerBase(base_folder(folder)).statement().tensors
        model = StoredModel.of_run(found, ((tensor.name, tuple(tensor.shape)) for tensor in tensors))
    return segment_needs(segment_costs(model, config), config), shared_nbytes(model, config)
