"""What has to be kept of a model, layer by layer: weights, optimiser state, basis, the tracker's sums, random state.

The layers are `first`, `blocks.N` and `last`, and `run` for what belongs to no layer. Nothing depends on how many
processes hold them.
"""

import platform
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from thinpipe import __version__
from thinpipe.checkpoint.folder import Checkpoint, Manifest
from thinpipe.core.errors import UserError
from thinpipe.models import GPT2Config, LlamaConfig, Model, ModelConfig
from thinpipe.subspace import GrassmannTracker, Subspace

FAMILIES: dict[str, type[ModelConfig]] = {"llama": LlamaConfig, "gpt2": GPT2Config}
_RUN = "run"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def describe(model: Model, *, step: int, samples_seen: int, run: str) -> Manifest:
    """What the manifest of a checkpoint of this model says, before its files are written."""
    config = model.config
    basis = model.space.basis if isinstance(model.space, Subspace) else None
    return Manifest(
        step=step,
        samples_seen=samples_seen,
        run=run,
        family=next(name for name, config_type in FAMILIES.items() if type(config) is config_type),
        model=msgspec.to_builtins(config),
        basis_version=basis.version if basis else None,
        basis_sha256=basis.hash if basis else None,
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Of everything that decides what the numbers are."""
    return {"thinpipe": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def model_config_of(checkpoint: Checkpoint) -> ModelConfig:
    manifest = checkpoint.manifest
    if manifest.family not in FAMILIES:
        raise UserError(f"{checkpoint.path} holds a model of family {manifest.family!r}, known are {list(FAMILIES)}")
    return msgspec.convert(manifest.model, FAMILIES[manifest.family])


def state_by_layer(
    model: Model, optimizer: torch.optim.Optimizer | None = None, tracker: GrassmannTracker | None = None
) -> dict[str, dict[str, Tensor]]:
    """Views of everything to save; nothing is copied."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        tensors = layers.setdefault(_layer_of(name), {})
        tensors[name] = parameter.detach()
        for key, value in _moments(optimizer, parameter).items():
            tensors[f"{name}:{key}"] = value
    run = {"random_state": torch.get_rng_state()}
    run |= {f"space.{name}": buffer for name, buffer in model.space.state_dict().items()}
    if tracker is not None:
        run |= {"tracker.su_DK": tracker.su_DK, "tracker.trace": tracker.trace}
    return {**layers, _RUN: run}


@torch.no_grad()
def restore(
    checkpoint: Checkpoint,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    tracker: GrassmannTracker | None = None,
) -> None:
    """Sets everything to what was saved. Without an optimiser only weights and basis."""
    parameters = dict(model.named_parameters())
    for layer in dict.fromkeys(_layer_of(name) for name in parameters):
        tensors = checkpoint.layer(layer)
        for name, parameter in parameters.items():
            if _layer_of(name) == layer:
                parameter.copy_(_get(tensors, name, checkpoint))
                if optimizer is not None:
                    _set_moments(optimizer, parameter, name, tensors)
    run = checkpoint.layer(_RUN)
    buffers = {name.removeprefix("space."): value for name, value in run.items() if name.startswith("space.")}
    model.space.load_state_dict(buffers)
    if isinstance(model.space, Subspace):
        _restore_basis(checkpoint, model.space)
        if tracker is not None:
            tracker.restart(model.space.basis)
            tracker.su_DK.copy_(_get(run, "tracker.su_DK", checkpoint))
            tracker.trace.copy_(_get(run, "tracker.trace", checkpoint))
    if optimizer is not None:
        torch.set_rng_state(_get(run, "random_state", checkpoint))


def _restore_basis(checkpoint: Checkpoint, space: Subspace) -> None:
    manifest = checkpoint.manifest
    if manifest.basis_version is None or space.basis.hash != manifest.basis_sha256:
        raise UserError(f"{checkpoint.path}: the basis is not the one that the manifest names")
    space.version = manifest.basis_version


def _layer_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def _moments(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Mapping[str, Tensor]:
    state: dict[str, Any] = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    return {key: state[key] for key in _MOMENTS if key in state}


def _set_moments(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, tensors: Mapping[str, Tensor]
) -> None:
    saved = {key: tensors[f"{name}:{key}"] for key in _MOMENTS if f"{name}:{key}" in tensors}
    if saved:
        optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in saved.items()}


def _get(tensors: Mapping[str, Tensor], name: str, checkpoint: Checkpoint) -> Tensor:
    if name not in tensors:
        raise UserError(f"{checkpoint.path} has no {name}: it was saved from another model or without an optimiser")
    return tensors[name]
