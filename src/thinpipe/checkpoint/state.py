"""Training state by checkpoint layer: weights, optimizer moments, basis, basis tracker sums.

The layers are `first`, `blocks.N`, `projections.N` and `last`, plus `run` for the tensors that every process has. They
do not depend on the number of processes. No RNG state is saved: random numbers are drawn from seeds derived from their
use (step, micro-batch, segment, ...).
"""

import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn

from thinpipe import __version__
from thinpipe.boundary.contract import BoundaryMethod
from thinpipe.checkpoint.codec_state import codec_states
from thinpipe.checkpoint.storage import Checkpoint, Manifest
from thinpipe.config.families import model_of_manifest
from thinpipe.config.huggingface_model import HUGGINGFACE, HuggingFaceModelConfig
from thinpipe.config.precision import recipe_names
from thinpipe.core.errors import UserError
from thinpipe.core.numerics import NUMERICS_VERSION
from thinpipe.models import ModelConfig
from thinpipe.models.protocol import PipelineModel, trainable_parameters
from thinpipe.optim.master_weights import set_weights, weights_of
from thinpipe.optim.rowwise_adamw import RowwiseAdamW, second_moment_shape
from thinpipe.subspace import Basis, GrassmannTracker, Subspace

_RUN, _LAST = "run", "last"
_TRACKER_SUM, _TRACKER_TRACE = "tracker:su_DK", "tracker:trace"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq", "exp_avg_max", "exp_avg_sq_max")
"""Names in the state of `RowwiseAdamW`; the last two are there for 8-bit moments only."""


def new_manifest(
    model: PipelineModel,
    *,
    step: int = 0,
    samples_seen: int = 0,
    data_sha256: str = "",
    run: str = "",
    base_sha256: str = "",
    rounds: int | None = None,
) -> Manifest:
    """Manifest of a checkpoint of this model, still without files and checksum. `base_sha256`: hash of the base of a
    Hugging Face model. `rounds`: number of merged rounds; None: the run has none."""
    config = model.config
    described = asdict(cast(Any, config))  # all fields: msgspec omits defaults of structs that it has decoded
    basis = model.space.basis if isinstance(model.space, Subspace) else None
    return Manifest(
        step=step,
        samples_seen=samples_seen,
        data_sha256=data_sha256,
        run=run,
        family=config.family,
        model=described | ({"base_sha256": base_sha256} if base_sha256 else {}),
        basis_version=basis.version if basis else None,
        basis_sha256=basis.hash if basis else None,
        versions=versions(),
        rounds=msgspec.UNSET if rounds is None else rounds,
    )


def versions() -> dict[str, str]:
    """Versions of the software that affects numerical results, and the number of torch threads, which does so too."""
    return {
        "thinpipe": __version__,
        "numerics": str(NUMERICS_VERSION),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def model_config_of(checkpoint: Checkpoint) -> ModelConfig:
    """Model configuration of a checkpoint. Raises UserError for an unknown family."""
    manifest = checkpoint.manifest
    return model_of_manifest(manifest.family, manifest.model, where=str(checkpoint.path))


def pipeline_config_of(checkpoint: Checkpoint) -> ModelConfig | HuggingFaceModelConfig:
    """Model configuration of a checkpoint of either kind of model. Raises UserError."""
    manifest = checkpoint.manifest
    if manifest.family == HUGGINGFACE:
        return msgspec.convert(manifest.model, HuggingFaceModelConfig)
    return model_config_of(checkpoint)


def refuse_other_model(asked: ModelConfig | HuggingFaceModelConfig, checkpoint: Checkpoint) -> None:
    """Raises UserError, with what differs, unless the checkpoint has this model. A base may have moved: it is known by
    its hash (`refuse_other_base`)."""
    saved = pipeline_config_of(checkpoint)
    if isinstance(asked, HuggingFaceModelConfig) and isinstance(saved, HuggingFaceModelConfig):
        saved = replace(saved, source=asked.source, base_sha256=asked.base_sha256)
    if asked == saved:
        return
    first, second = _flat(asdict(asked)), _flat(asdict(saved))
    differing = [
        f"{key} is {value} in the settings and {second.get(key, 'not set')} there"
        for key, value in first.items()
        if value != second.get(key)
    ]
    raise UserError(
        f"the checkpoint {checkpoint.path} has another model than the settings "
        f"({'; '.join(differing) or 'another family'}): choose another job.dump_folder, or the model "
        "settings that this run began with"
    )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key, without those of inner tables in one piece."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def refuse_other_base(source: str, sha256: str, checkpoint: Checkpoint) -> None:
    """Raises UserError unless the base of a Hugging Face model has the hash of the one that the checkpoint was trained
    on."""
    saved = str(checkpoint.manifest.model.get("base_sha256", ""))
    if saved and saved != sha256:
        raise UserError(
            f"{checkpoint.path} was trained on another base than {source}: its tensors have the sha256 {sha256}, and "
            f"those of the base had {saved}. Set model.hf to the folder or revision that the run began with"
        )


def layers_of(parameters: Iterable[str]) -> list[str]:
    """Layers that hold these parameters (by name), and the layer `run`."""
    return [*dict.fromkeys(_layer_of(name) for name in parameters), _RUN]


def layers_by_segment(model: PipelineModel, method: BoundaryMethod | None) -> list[list[str]]:
    """Checkpoint layers that a process with only this segment writes, by segment. `method`: that of every boundary. Of
    all layers only `run` is written with every segment, with the same contents."""
    methods = [] if method is None else [method] * (len(model.segments) - 1)
    return [
        [*layers_of(trainable_parameters(segment)), *codec_states(methods, [index])]
        for index, segment in enumerate(model.segments)
    ]


def state_by_layer(
    parameters: Mapping[str, nn.Parameter],
    space: nn.Module | None,
    optimizer: torch.optim.Optimizer | None = None,
    tracker: GrassmannTracker | None = None,
    beside: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Tensors to save by layer, as views without copies. `tracker` requires the parameters of the layer `last`.
    `beside`: further tensors of a parameter, by their own names, see `saved_beside`."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        tensors = layers.setdefault(_layer_of(name), {})
        tensors[name] = weights_of(parameter)
        for key, value in {**_moments(optimizer, parameter), **(beside or {}).get(name, {})}.items():
            tensors[f"{name}:{key}"] = value
    if tracker is not None:
        layers[_LAST] |= {_TRACKER_SUM: tracker.su_DK, _TRACKER_TRACE: tracker.trace}
    if space is not None:
        layers[_RUN] = {f"space.{name}": buffer for name, buffer in space.state_dict().items()}
    return layers


@torch.no_grad()
def restore(
    checkpoint: Checkpoint,
    parameters: Mapping[str, nn.Parameter],
    space: nn.Module,
    optimizer: RowwiseAdamW | None = None,
    tracker: GrassmannTracker | None = None,
) -> None:
    """Restores the saved state in place; without an optimizer and tracker, only weights and basis. What a base and its
    new adapters are by themselves stays as it is.

    Raises UserError if the checkpoint does not fit the parameters, their dtype or the optimizer settings.
    """
    for layer in dict.fromkeys(_layer_of(name) for name in parameters):
        if checkpoint.manifest.is_base and not checkpoint.has(layer):
            continue
        tensors = checkpoint.layer(layer)
        for name, parameter in parameters.items():
            if _layer_of(name) == layer:
                saved = _get(tensors, name, checkpoint)
                if optimizer is not None:
                    _refuse_other_dtype(parameter, saved, checkpoint)
                    _set_moments(optimizer, parameter, name, tensors, checkpoint)
                set_weights(parameter, saved)
    run = checkpoint.layer(_RUN)
    buffers = {name.removeprefix("space."): value for name, value in run.items() if name.startswith("space.")}
    space.load_state_dict(buffers)
    if isinstance(space, Subspace):
        saved_basis = Basis(_get(run, "space.basis_DK", checkpoint), checkpoint.manifest.basis_version or 0)
        if saved_basis.hash != checkpoint.manifest.basis_sha256:
            raise UserError(f"{checkpoint.path}: the basis is not the one that the manifest names")
        space.version = saved_basis.version
        if tracker is not None:
            tracker.restart(space.basis)
            last = checkpoint.layer(_LAST)
            if _TRACKER_SUM in last:  # absent if the basis was fixed so far: a new interval begins
                tracker.su_DK.copy_(last[_TRACKER_SUM])
                tracker.trace.copy_(last[_TRACKER_TRACE])


def saved_beside(checkpoint: Checkpoint, parameters: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Tensors that were saved beside the weights and moments of these parameters, by parameter and their own names."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for layer in dict.fromkeys(map(_layer_of, found)):
        for saved, tensor in (checkpoint.layer(layer) if checkpoint.has(layer) else {}).items():
            name, _, key = saved.partition(":")
            if key and name in found and key not in _MOMENTS:
                found[name][key] = tensor
    return found


def _layer_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] in ("blocks", "projections") else parts[0]


def _moments(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Mapping[str, Tensor]:
    state: dict[str, Any] = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    return {key: state[key] for key in _MOMENTS if key in state}


def _set_moments(
    optimizer: RowwiseAdamW,
    parameter: nn.Parameter,
    name: str,
    tensors: Mapping[str, Tensor],
    checkpoint: Checkpoint,
) -> None:
    saved = {key: tensors[f"{name}:{key}"] for key in _MOMENTS if f"{name}:{key}" in tensors}
    if not saved:
        return
    if any(moment.dtype == torch.bfloat16 for moment in saved.values()):
        raise UserError(
            f"{checkpoint.path} has moments in bfloat16, as thinpipe kept them before its recipes: "
            "start a new run from it with model.initial"
        )
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    expected = second_moment_shape(parameter, group["second_moment"])
    if saved["exp_avg_sq"].shape != expected:  # the fused kernel would read out of bounds
        raise UserError(
            f"{checkpoint.path} was saved with another optimizer.second_moment than {group['second_moment']!r}: "
            "go on with the old one, or start a new run from it with model.initial"
        )
    optimizer.set_state(parameter, saved)


def _refuse_other_dtype(parameter: nn.Parameter, saved: Tensor, checkpoint: Checkpoint) -> None:
    expected = weights_of(parameter).dtype
    if saved.dtype != expected:
        there, here = (recipe_names(str(dtype).removeprefix("torch.")) for dtype in (saved.dtype, expected))
        raise UserError(
            f"{checkpoint.path} was trained with training.precision {there}, and this run has {here}, whose optimiser "
            "state is another: set training.precision back, or start a new run from it with model.initial"
        )


def _get(tensors: Mapping[str, Tensor], name: str, checkpoint: Checkpoint) -> Tensor:
    if name not in tensors:
        raise UserError(f"{checkpoint.path} has no {name}: it was saved from another model or without an optimiser")
    return tensors[name]
