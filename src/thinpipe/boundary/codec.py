"""Codecs by name, for trainers of other people: `codec("int4", shape=(8, 512, 768))` encodes tensors of that shape as
bytes of a stated length and decodes them.

A codec is one direction of a boundary: a compressor and its feedback. `boundary_config` makes the settings of both
directions from a name.
"""

import difflib
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinpipe.boundary.contract import DirectionCodec, MessageContext, MessageId, MessageShape, unshared
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.registry import COMPRESSORS, make_method
from thinpipe.boundary.settings_tensor import changed_settings, settings_tensor
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.toml import from_table
from thinpipe.core.errors import UserError

_SETTINGS, _ENCODED, _ENCODER, _DECODER = "settings", "encoded", "encoder.", "decoder."


class Codec:
    """Encodes tensors [B, T, W] as uint8 [nbytes] and decodes them. Made by `codec`.

    No gradient flows through it: the receiver trains on what it decoded (`requires_grad_()`), and the gradient of that
    goes back as a message of its own. With a feedback, encoder and decoder keep codec state between messages: a sender
    encodes and a receiver decodes every message once, in the same order, each with a codec of its own.
    """

    def __init__(self, direction: DirectionCodec, settings: Mapping[str, Any]) -> None:
        """`settings`: the arguments of `codec` by name, as plain values."""
        self._direction, self._settings, self._encoded = direction, settings, 0

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings.items() if name != "name")
        return f"Codec({self._settings['name']!r}, {settings}, nbytes={self.nbytes})"

    @property
    def nbytes(self) -> int:
        """Bytes of every encoded tensor: known before the first one, and the same for all."""
        return self._direction.compressor.nbytes

    @torch.no_grad()
    def encode(self, values_BTW: Tensor) -> Tensor:
        """uint8 [nbytes], on the device of `values_BTW`, which may be of any data type; in memory of its own. Raises
        ValueError if the shape is not the codec's."""
        shape = self._direction.shape
        if not isinstance(values_BTW, Tensor):
            raise TypeError(f"encode takes a tensor of torch, and got {type(values_BTW).__name__}")
        if values_BTW.shape != (shape.batch, shape.tokens, shape.width):
            raise ValueError(
                f"a tensor of {tuple(values_BTW.shape)} for a codec of {_dimensions(shape)}: a codec has one shape, "
                "make another for another (thinpipe.codec)"
            )
        message = MessageId(seed=self._settings["seed"], step=self._encoded, microbatch=0, boundary=0)
        self._encoded += 1
        context = MessageContext(
            training=True,
            uniform=(lambda like: message.uniform(like, "codec")) if self._settings["stochastic"] else None,
        )
        data = self._direction.encode(values_BTW.float(), context)
        if data.dtype != torch.uint8 or data.shape != (self.nbytes,):
            raise ValueError(f"{self!r} encoded a tensor as {tuple(data.shape)} {data.dtype}: its compressor has a bug")
        return unshared(data, values_BTW)

    @torch.no_grad()
    def decode(self, data: Tensor) -> Tensor:
        """[B, T, W] in the codec's data type, on the device of `data`, in memory of its own. Raises ValueError if the
        length is wrong."""
        values_BTW = self._direction.decode(self._checked(data), MessageContext(training=True))
        if values_BTW.shape != (shape := _dimensions(self._direction.shape)):
            raise ValueError(
                f"{self!r} decoded a message to {tuple(values_BTW.shape)}, not {shape}: its compressor has a bug"
            )
        return unshared(values_BTW.to(self._direction.shape.dtype), data)

    def _checked(self, data: Tensor) -> Tensor:
        if not isinstance(data, Tensor):
            raise TypeError(
                f"decode takes a tensor of torch, uint8, and got {type(data).__name__}: of bytes, "
                "torch.frombuffer(bytearray(data), dtype=torch.uint8)"
            )
        if data.dtype != torch.uint8 or data.shape != (self.nbytes,):
            raise ValueError(
                f"a message of {tuple(data.shape)} {data.dtype} for a codec of {self.nbytes} bytes: both ends need a "
                "codec of the same name, shape and settings"
            )
        return data

    def codec_state(self) -> dict[str, Tensor]:
        """What a checkpoint of this end needs: the settings, the number of tensors encoded so far, and with a feedback
        the tensors that it keeps."""
        state = {_SETTINGS: settings_tensor(self._settings), _ENCODED: torch.tensor(self._encoded)}
        for end, tensors in self._ends().items():
            state |= {f"{end}{name}": tensor for name, tensor in tensors.items()}
        return state

    def load_codec_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `codec_state` returned. Raises UserError, before anything is changed, if it was saved by a
        codec of another name, shape, dtype, seed or other settings."""
        tensors = {end: {name: state.get(f"{end}{name}") for name in here} for end, here in self._ends().items()}
        if not {_SETTINGS, _ENCODED} <= {*state} or any(
            found is None for part in tensors.values() for found in part.values()
        ):
            raise UserError(f"this is no codec state of {self!r}: it has {', '.join(state) or 'nothing'}")
        if changed := changed_settings(state[_SETTINGS], self._settings):
            raise UserError(f"the codec state was saved by a codec with other settings (saved -> here): {changed}")
        self._direction.load_encoder_state(tensors[_ENCODER])  # type: ignore[arg-type]
        self._direction.load_decoder_state(tensors[_DECODER])  # type: ignore[arg-type]
        self._encoded = int(state[_ENCODED])

    def _ends(self) -> dict[str, dict[str, Tensor]]:
        return {_ENCODER: self._direction.encoder_state(), _DECODER: self._direction.decoder_state()}


def codec(
    name: str,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    stochastic: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Codec:
    """The codec `name` for tensors of `shape`: B samples, T tokens, W numbers.

    Names: the number formats fp32, bf16, int8 and int4; topk, quantise and lowrank with the fields of
    `CompressionConfig` as `settings` (`codec("topk", shape, keep=0.1, feedback="ef")`); registered compressors. int8
    and int4 rotate each token, so that one large value costs the others less precision.
    `dtype`: data type of decoded tensors. `stochastic`: unbiased rounding to integers (int8, int4, quantise), for
    gradients, with random numbers that are a function of `seed` and the number of tensors encoded so far; bf16 and
    lowrank round to nearest even all the same. Sender and receiver need the same `seed`. Raises UserError for an
    unknown name, and for settings without effect or out of range.
    """
    seed, settings = whole_number("seed", seed), {key: _plain(value) for key, value in settings.items()}
    if name in FORMATS:
        if settings:
            raise UserError(f"the number format {name} has no settings: leave out {', '.join(settings)}")
        config = BoundaryConfig(forward=name)  # type: ignore[arg-type]
    elif name in COMPRESSORS:
        config = _config_of_compressor(name, settings)
    else:
        raise _unknown(name)
    sizes = message_shape(shape, dtype)
    method = make_method(_refuse_token_ids(config), sizes, in_subspace=False, seed=seed)
    arguments = {"name": name, "shape": list(_dimensions(sizes)), "dtype": str(dtype), "stochastic": stochastic}
    return Codec(method.states, {**arguments, "seed": seed, **settings})


def _config_of_compressor(name: str, settings: dict[str, Any]) -> BoundaryConfig:
    where = f"codec {name!r}"
    if "kind" in settings:
        raise UserError(f"{where}: the name is the kind: leave kind out")
    compression = replace(from_table(settings, CompressionConfig, where=where), kind=name)  # type: ignore[arg-type]
    try:
        return BoundaryConfig(states=compression)
    except UserError as error:  # which names the settings as in a run file
        raise UserError(f"{where}: {re.sub('boundary[.]states[.]', '', str(error))}") from None


def boundary_config(boundary: str | BoundaryConfig) -> BoundaryConfig:
    """Settings of both directions of a boundary. A name stands for a number format in both directions.

    Raises UserError for a name that needs settings, and for AQ-SGD, which needs token ids.
    """
    if isinstance(boundary, BoundaryConfig):
        return _refuse_token_ids(boundary)
    if not isinstance(boundary, str):
        raise UserError(
            f"boundary is {boundary!r}: write the name of a number format or a thinpipe.BoundaryConfig(...)"
        )
    if boundary in FORMATS:
        return BoundaryConfig(forward=boundary, backward=boundary)  # type: ignore[arg-type]
    if boundary in COMPRESSORS:
        raise UserError(
            f"{boundary} is one direction with settings of its own: pass BoundaryConfig(states=CompressionConfig("
            f'kind="{boundary}", ...), gradients=...)'
        )
    raise _unknown(boundary)


def _refuse_token_ids(config: BoundaryConfig) -> BoundaryConfig:
    if config.states.feedback == "aqsgd":
        raise UserError('feedback = "aqsgd" finds samples by their token ids, which are not sent here: use ef or ef21')
    return config


def message_shape(shape: Sequence[int], dtype: torch.dtype) -> MessageShape:
    """Shape of messages without token ids. Raises UserError for a shape or data type that no message has."""
    try:
        batch, tokens, width = map(operator.index, shape)
    except (TypeError, ValueError):
        batch = tokens = width = 0
    if min(batch, tokens, width) < 1:
        raise UserError(
            f"shape is {shape!r}: write three whole numbers from 1, (samples, tokens, width); for a tensor [N, W] "
            "it is (1, N, W)"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"dtype is {dtype!r}: write a floating-point type of torch, as torch.bfloat16")
    return MessageShape(batch=batch, tokens=tokens, width=width, vocab_size=0, dtype=dtype)


def whole_number(name: str, value: Any) -> int:
    """The argument as an int, also of numpy. Raises UserError if it is no whole number."""
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name} is {value!r}: write a whole number") from None


def _plain(value: Any) -> Any:
    """A number of numpy or torch as one of Python."""
    return value.item() if hasattr(value, "item") else value


def _unknown(name: str) -> UserError:
    names = (*FORMATS, *COMPRESSORS)
    nearest = difflib.get_close_matches(str(name).lower(), names, n=1)
    advice = f"did you mean {nearest[0]}? There are" if nearest else "there are"
    return UserError(f"there is no codec {name!r}: {advice} {', '.join(names)}")


def _dimensions(shape: MessageShape) -> tuple[int, int, int]:
    return shape.batch, shape.tokens, shape.width
