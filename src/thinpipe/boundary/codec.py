"""Codecs by name, for trainers of other people: `codec("int4", shape=(8, 512, 768))` encodes tensors of that shape as
bytes of a stated length and decodes them.

A codec is one direction of a boundary: a compressor and its feedback. `boundary_config` makes the settings of both
directions from a name.
"""

from typing import Any

import torch
from torch import Tensor

from thinpipe.boundary.contract import DirectionCodec, MessageContext, MessageId, MessageShape, unshared
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.registry import COMPRESSORS, make_method
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.core.errors import UserError


class Codec:
    """Encodes tensors [B, T, W] as uint8 [nbytes] and decodes them. Made by `codec`.

    With a feedback, encoder and decoder keep codec state between messages: a sender encodes and a receiver decodes
    every message once, in the same order, each with a codec of its own.
    """

    def __init__(self, direction: DirectionCodec, *, stochastic: bool, seed: int) -> None:
        self._direction, self._stochastic, self._seed, self._encoded = direction, stochastic, seed, 0

    @property
    def nbytes(self) -> int:
        """Bytes of every encoded tensor: known before the first one, and the same for all."""
        return self._direction.compressor.nbytes

    @torch.no_grad()
    def encode(self, values_BTW: Tensor) -> Tensor:
        """uint8 [nbytes], on the device of `values_BTW`, in memory of its own. Raises ValueError if the shape is not
        the codec's."""
        shape = self._direction.shape
        if values_BTW.shape != (shape.batch, shape.tokens, shape.width):
            raise ValueError(f"a tensor of {tuple(values_BTW.shape)} for a codec of {_dimensions(shape)}")
        message = MessageId(seed=self._seed, step=self._encoded, microbatch=0, boundary=0)
        self._encoded += 1
        context = MessageContext(
            training=True, uniform=(lambda like: message.uniform(like, "codec")) if self._stochastic else None
        )
        return unshared(self._checked(self._direction.encode(values_BTW.float(), context)), values_BTW)

    @torch.no_grad()
    def decode(self, data: Tensor) -> Tensor:
        """[B, T, W] in the codec's data type, on the device of `data`, in memory of its own. Raises ValueError if the
        length is wrong."""
        values_BTW = self._direction.decode(self._checked(data), MessageContext(training=True))
        return unshared(values_BTW.to(self._direction.shape.dtype), data)

    def _checked(self, data: Tensor) -> Tensor:
        if data.dtype != torch.uint8 or data.shape != (self.nbytes,):
            raise ValueError(f"a message of {tuple(data.shape)} {data.dtype} for a codec of {self.nbytes} bytes")
        return data


def codec(
    name: str,
    shape: tuple[int, int, int],
    *,
    dtype: torch.dtype = torch.float32,
    stochastic: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Codec:
    """The codec `name` for tensors of `shape`: B samples, T tokens, W numbers.

    Names: the number formats fp32, bf16, int8 and int4 (rotated); topk, quantise and lowrank with the fields of
    `CompressionConfig` as `settings` (`codec("topk", shape, keep=0.1, feedback="ef")`); registered compressors.
    `dtype`: data type of decoded tensors. `stochastic`: unbiased rounding to integers (int8, int4, quantise), for
    gradients, with random numbers that are a function of `seed` and the number of tensors encoded so far; bf16 and
    lowrank round to nearest even all the same. Sender and receiver need the same `seed`. Raises UserError for an
    unknown name, and for settings without effect or out of range.
    """
    if name in FORMATS:
        if settings:
            raise UserError(f"the number format {name} has no settings: leave out {', '.join(settings)}")
        config = BoundaryConfig(forward=name)  # type: ignore[arg-type]
    elif name in COMPRESSORS:
        try:
            config = BoundaryConfig(states=CompressionConfig(kind=name, **settings))  # type: ignore[arg-type]
        except TypeError:
            raise UserError(f"codec {name!r} has a setting that there is not: see CompressionConfig") from None
    else:
        raise _unknown(name)
    method = make_method(_refuse_token_ids(config), message_shape(shape, dtype), in_subspace=False, seed=seed)
    return Codec(method.states, stochastic=stochastic, seed=seed)


def boundary_config(boundary: str | BoundaryConfig) -> BoundaryConfig:
    """Settings of both directions of a boundary. A name stands for a number format in both directions.

    Raises UserError for a name that needs settings, and for AQ-SGD, which needs token ids.
    """
    if isinstance(boundary, BoundaryConfig):
        return _refuse_token_ids(boundary)
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


def message_shape(shape: tuple[int, int, int], dtype: torch.dtype) -> MessageShape:
    """Shape of messages without token ids."""
    batch, tokens, width = shape
    return MessageShape(batch=batch, tokens=tokens, width=width, vocab_size=0, dtype=dtype)


def _unknown(name: str) -> UserError:
    return UserError(f"there is no codec {name!r}: there are {', '.join((*FORMATS, *COMPRESSORS))}")


def _dimensions(shape: MessageShape) -> tuple[int, int, int]:
    return shape.batch, shape.tokens, shape.width
