"""Codecs at the boundaries of compressed stages, and their codec state as named tensors for checkpoints.

Used by `CompressedStage` (the boundaries before and after one stage) and `CompressedSequential` (all boundaries).
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from thinpipe.boundary.codec import boundary_config, message_shape, whole_number
from thinpipe.boundary.contract import BoundaryMethod, MessageId, codec_state_parts
from thinpipe.boundary.registry import make_method
from thinpipe.boundary.settings_tensor import changed_settings, settings_tensor
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.core.errors import UserError

_LOG = logging.getLogger(__name__)
_STEP, _SETTINGS = "step_number", "settings"
SETTINGS_NBYTES = 2048
"""Bytes of the message with the settings of a stage: more than they take."""


class BoundaryCodecs:
    """One boundary method for each boundary next to given stages."""

    def __init__(
        self,
        stages: Collection[int],
        num_stages: int,
        *,
        shape: Sequence[int],
        boundary: str | BoundaryConfig,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        """`stages`: indices of the stages in this process. Other arguments as those of `CompressedStage`."""
        config, shape_and_dtype = boundary_config(boundary), message_shape(shape, dtype)
        if dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"dtype is {dtype}: between stages write torch.float32 or torch.bfloat16")
        self._stages, self._seed = stages, whole_number("seed", seed)
        self._dtype, self._warned = dtype, False
        self._shape = (shape_and_dtype.batch, shape_and_dtype.tokens, shape_and_dtype.width)
        self._methods = {
            index: make_method(config, shape_and_dtype, in_subspace=False, seed=self._seed)
            for index in range(num_stages - 1)
            if index in stages or index + 1 in stages
        }
        settings = {"shape": list(self._shape), "dtype": str(dtype), "seed": self._seed, "boundary": config}
        self._settings: dict[str, Any] = msgspec.to_builtins(settings, enc_hook=str)

    def method(self, boundary: int, *, training: bool) -> BoundaryMethod:
        """Codec of a boundary for training, or its inference variant."""
        method = self._methods[boundary]
        return method if training else method.at_inference

    def message_id(self, boundary: int, *, step: int, microbatch: int, training: bool) -> MessageId:
        return MessageId(seed=self._seed, step=step, microbatch=microbatch, boundary=boundary, training=training)

    @property
    def forward_nbytes(self) -> int:
        """Bytes of a forward message in training; 0 without boundaries."""
        return next((method.states.compressor.nbytes for method in self._methods.values()), 0)

    @property
    def backward_nbytes(self) -> int:
        """Bytes of a backward message; 0 without boundaries."""
        return next((method.backward_nbytes for method in self._methods.values()), 0)

    def check_state(self, state: Tensor, stage: int) -> None:
        """Raises ValueError if what a stage returned is not of the stated shape; warns once if it is of another data
        type, unless autocast makes it so."""
        if state.shape != self._shape:
            raise ValueError(
                f"stage {stage} returned a tensor of {tuple(state.shape)}, and {self._shape} were stated: state the "
                "shape of one micro-batch, and leave out a smaller last batch (drop_last=True of a DataLoader)"
            )
        if state.dtype != self._dtype and not self._warned and not torch.is_autocast_enabled(state.device.type):
            self._warned = True
            _LOG.warning(
                "stage %d returned %s, and stage %d gets %s: if its module computes in %s, pass dtype=%s",
                *(stage, state.dtype, stage + 1, self._dtype, state.dtype, state.dtype),
            )

    def settings_message(self, step_number: int) -> Tensor:
        """The settings and the number of the last step for the next stage, uint8 [SETTINGS_NBYTES]."""
        return settings_tensor({**self._settings, _STEP: step_number}, SETTINGS_NBYTES)

    def compare_settings(self, message: Tensor, step_number: int, *, previous: int) -> None:
        """Raises UserError if the previous stage was made with other settings, or is at another step: the messages
        would have another length, or decode to other numbers."""
        changed = changed_settings(message, {**self._settings, _STEP: step_number})
        if not changed:
            return
        advice = "load_codec_state in all stages or in none" if changed.startswith(_STEP) else "make all with the same"
        raise UserError(
            f"stages {previous} and {previous + 1} were made with different settings ({previous} -> {previous + 1}): "
            f"{changed}: {advice}"
        )

    def state(self, step_number: int) -> dict[str, Tensor]:
        """Step number, and for each end of a boundary in this process its settings (JSON as uint8) and codec state."""
        state = {_STEP: torch.tensor(step_number)}
        settings = settings_tensor(self._settings)
        for end, save, _ in codec_state_parts(self._methods, self._stages):
            part = {_SETTINGS: settings, **save()}
            state |= {f"{end}.{name}": tensor for name, tensor in part.items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> int:
        """Restores what `state` returned, and returns the step number. Names of other ends are ignored.

        Raises UserError, before anything is changed, if an end of a boundary is missing or has other settings.
        """
        if _STEP not in state:
            raise UserError(f"this is no codec state of compressed stages: it has no {_STEP}")
        loads = []
        for end, save, load in codec_state_parts(self._methods, self._stages):
            part = {name.removeprefix(f"{end}."): state[name] for name in state if name.startswith(f"{end}.")}
            saved = part.pop(_SETTINGS, None)
            if saved is None:
                raise UserError(f"this codec state has no {end}: it was saved from another stage")
            if changed := changed_settings(saved, self._settings):
                raise UserError(f"the codec state of {end} was saved with other settings (saved -> here): {changed}")
            if {name: tensor.shape for name, tensor in part.items()} != {k: v.shape for k, v in save().items()}:
                raise UserError(f"the codec state of {end} is incomplete: it has {', '.join(part) or 'no tensors'}")
            loads.append((load, part))
        for load, part in loads:
            load(part)
        return int(state[_STEP])
