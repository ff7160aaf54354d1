"""Interfaces of boundary codecs: `Compressor` (stateless), `DirectionCodec` (a compressor and its codec state) and
`BoundaryMethod` (one direction codec for states and one for gradients).

A codec guarantees exact message lengths and results that do not depend on where it runs. The contract test checks this
for every method, format and schedule in the registries: N processes compute bit-identically to a single process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.boundary.formats import UniformSampler
from thinpipe.boundary.packing import (
    pack_flagged_ids,
    pack_flags,
    pack_ids,
    unpack_flagged_ids,
    unpack_flags,
    unpack_ids,
)
from thinpipe.boundary.sizes import MessageSize
from thinpipe.device.counter_random import uniform


@dataclass(frozen=True, kw_only=True)
class MessageShape(MessageSize):
    """Size of a message (`batch` samples of `tokens` tokens of `width` numbers; `rows` is their product without the
    width), and the data type of the state at both ends."""

    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class MessageId:
    """Identity of a message. Random numbers used to encode a message are a function of its MessageId and direction."""

    seed: int
    step: int
    microbatch: int
    boundary: int
    training: bool = True
    """False in validation, which never changes codec state."""

    def uniform(self, like: Tensor, direction: str) -> Tensor:
        """Uniform random numbers in [0, 1), one per element of `like`: identical on every device, in every process."""
        return uniform(like, self.seed, self.step, self.microbatch, self.boundary, direction)


@dataclass(frozen=True, kw_only=True)
class MessageContext:
    """Information about a message that sender and receiver both have, so that it need not be sent."""

    training: bool
    uniform: UniformSampler | None = None
    """Random numbers for stochastic rounding of gradients to integers (int8, int4, quantise); bf16 and lowrank round to
    nearest even without them. None, for states: round to nearest."""
    ids_BW: Tensor | None = None
    """States only: the token ids of the micro-batch."""
    kept_indices: Tensor | None = None
    """Gradients with `reuse_mask` only: positions that top-k selected in the state, [groups, count]."""


class Compressor(ABC):
    """Encodes a tensor as bytes and decodes it. Stateless, so that the sender can compute what the receiver decodes."""

    nbytes: int
    """Length of every encoded tensor in bytes, as computed in `boundary.sizes`."""

    @abstractmethod
    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        """float32 [B, T, W] to uint8 [nbytes]."""

    @abstractmethod
    def decode(self, data: Tensor, context: MessageContext) -> Tensor:
        """uint8 [nbytes] to float32 [B, T, W]."""


class DirectionCodec:
    """Codec of one direction of a boundary: a compressor and, in subclasses, codec state kept between messages. This
    base class has no state.

    Subclasses keep separate state for encoding and for decoding: with two processes each end uses one of the two, in a
    single process the same object holds both. Codec state relies on message order: in every schedule, and in the twin
    (the single-process reference), micro-batches cross a boundary in order in each direction.
    """

    def __init__(self, compressor: Compressor, shape: MessageShape, store: Path | None = None) -> None:
        """`store`: folder for codec state that may not fit in memory; None: keep it in memory."""
        self.compressor, self.shape, self.store = compressor, shape, store

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        return self.compressor.encode(values_BTW, context)

    def decode(self, data: Tensor, context: MessageContext) -> Tensor:
        return self.compressor.decode(data, context)

    def snapshot(self) -> None:
        """Remembers the codec state at the beginning of a step, for `rollback`."""

    def rollback(self) -> None:
        """Restores the codec state of the last `snapshot`, when a step is retried or skipped."""

    def encoder_state(self) -> dict[str, Tensor]:
        """Codec state of the encoding end, for checkpoints."""
        return {}

    def decoder_state(self) -> dict[str, Tensor]:
        return {}

    def load_encoder_state(self, state: Mapping[str, Tensor]) -> None:
        pass

    def load_decoder_state(self, state: Mapping[str, Tensor]) -> None:
        pass


class BoundaryMethod:
    """Codec of one boundary: states forward, gradients backward.

    A forward message is the encoded state followed by the token ids, or by their flags alone if `shape.has_ids` is
    False (in this order, so that the state stays aligned).
    The *sender* is the process with the segment before the boundary: it encodes states and decodes gradients. The
    *receiver* is the process with the segment after the boundary. Each of them holds the codec state of its own role; a
    process with both segments holds both.
    """

    def __init__(
        self,
        shape: MessageShape,
        states: DirectionCodec,
        gradients: DirectionCodec,
        *,
        at_inference: "BoundaryMethod | None" = None,
    ) -> None:
        self.shape, self.states, self.gradients = shape, states, gradients
        self.at_inference = at_inference or self
        """Codec of states in validation."""

    @property
    def forward_nbytes(self) -> int:
        return self.shape.ids_nbytes + self.states.compressor.nbytes

    @property
    def backward_nbytes(self) -> int:
        return self.gradients.compressor.nbytes

    def encode_state(self, state: Tensor, ids_BW: Tensor | None, message_id: MessageId) -> Tensor:
        """The encoded state as uint8, without the token ids, which only AQ-SGD needs."""
        return self.states.encode(state.float(), MessageContext(training=message_id.training, ids_BW=ids_BW))

    def decode_state(self, data: Tensor, ids_BW: Tensor | None, message_id: MessageId) -> Tensor:
        state = self.states.decode(data, MessageContext(training=message_id.training, ids_BW=ids_BW))
        return state.to(self.shape.dtype)

    def encode_gradient(self, gradient: Tensor, message_id: MessageId) -> Tensor:
        return self.gradients.encode(gradient.float(), self._backward(message_id))

    def decode_gradient(self, data: Tensor, message_id: MessageId) -> Tensor:
        return self.gradients.decode(data, self._backward(message_id)).to(self.shape.dtype)

    def _backward(self, message_id: MessageId, kept_indices: Tensor | None = None) -> MessageContext:
        return MessageContext(
            training=message_id.training,
            uniform=lambda like: message_id.uniform(like, "backward"),
            kept_indices=kept_indices,
        )

    @torch.no_grad()
    def pack_forward(self, ids_BW: Tensor, state: Tensor, message_id: MessageId) -> Tensor:
        """The complete forward message as uint8: the encoded state, then the token ids or their flags."""
        encoded = self.encode_state(state.detach(), ids_BW, message_id)
        message = torch.cat((encoded, self._pack_ids(ids_BW)))
        return self._with_checked_length(message, self.forward_nbytes)

    def _pack_ids(self, ids_BW: Tensor) -> Tensor:
        if self.shape.has_ids:
            return (pack_flagged_ids if self.shape.has_flags else pack_ids)(ids_BW, self.shape.vocab_size)
        return pack_flags(ids_BW) if self.shape.has_flags else torch.empty(0, dtype=torch.uint8, device=ids_BW.device)

    def _unpack_ids(self, packed: Tensor) -> Tensor:
        ids_shape = (self.shape.batch, self.shape.tokens + 1)
        if self.shape.has_ids:
            return (unpack_flagged_ids if self.shape.has_flags else unpack_ids)(
                packed, ids_shape, self.shape.vocab_size
            )
        if self.shape.has_flags:
            return unpack_flags(packed, ids_shape)
        return torch.zeros(ids_shape, dtype=torch.int64, device=packed.device)

    @torch.no_grad()
    def unpack_forward(self, message: Tensor, message_id: MessageId) -> tuple[Tensor, Tensor]:
        """The token ids, which are 0 if the message has none, with their flags, and the state."""
        message = self._with_checked_length(message, self.forward_nbytes)
        state_nbytes = self.states.compressor.nbytes
        ids_BW = self._unpack_ids(message[state_nbytes:])
        return ids_BW, self.decode_state(message[:state_nbytes], ids_BW, message_id)

    @torch.no_grad()
    def pack_state(self, state: Tensor, message_id: MessageId) -> Tensor:
        """A forward message without token ids, for models whose stages exchange nothing but the state. Never a view of
        `state`, which the model may overwrite before the message is sent."""
        message = unshared(self.encode_state(state.detach(), None, message_id), state)
        return self._with_checked_length(message, self.states.compressor.nbytes)

    @torch.no_grad()
    def unpack_state(self, message: Tensor, message_id: MessageId) -> Tensor:
        return self.decode_state(self._with_checked_length(message, self.states.compressor.nbytes), None, message_id)

    @torch.no_grad()
    def pack_backward(self, gradient: Tensor, message_id: MessageId) -> Tensor:
        return self._with_checked_length(self.encode_gradient(gradient, message_id), self.backward_nbytes)

    @torch.no_grad()
    def unpack_backward(self, message: Tensor, message_id: MessageId) -> Tensor:
        return self.decode_gradient(self._with_checked_length(message, self.backward_nbytes), message_id)

    def _with_checked_length(self, message: Tensor, nbytes: int) -> Tensor:
        if message.dtype != torch.uint8 or message.numel() != nbytes:
            raise ValueError(f"a message of {message.numel()} x {message.dtype}, but {nbytes} bytes were stated")
        return message

    def snapshot(self) -> None:
        """Remembers all codec state at the beginning of a step, for `rollback`."""
        self.states.snapshot()
        self.gradients.snapshot()

    def rollback(self) -> None:
        self.states.rollback()
        self.gradients.rollback()

    def sender_state(self) -> dict[str, Tensor]:
        """Codec state of the sender, for checkpoints: the same names at every step, empty for stateless codecs."""
        return _named(states=self.states.encoder_state(), gradients=self.gradients.decoder_state())

    def receiver_state(self) -> dict[str, Tensor]:
        """Codec state of the receiver, for checkpoints, as `sender_state`."""
        return _named(states=self.states.decoder_state(), gradients=self.gradients.encoder_state())

    def load_sender_state(self, state: Mapping[str, Tensor]) -> None:
        self.states.load_encoder_state(_part(state, "states"))
        self.gradients.load_decoder_state(_part(state, "gradients"))

    def load_receiver_state(self, state: Mapping[str, Tensor]) -> None:
        self.states.load_decoder_state(_part(state, "states"))
        self.gradients.load_encoder_state(_part(state, "gradients"))


_StatePart = tuple[str, Callable[[], dict[str, Tensor]], Callable[[Mapping[str, Tensor]], None]]


def codec_state_parts(methods: Mapping[int, BoundaryMethod], segments: Collection[int]) -> Iterator[_StatePart]:
    """Name, getter and loader of the codec state of each end of a boundary, for a process with these segments (or
    stages): `boundary.N.sender` with segment N, `boundary.N.receiver` with segment N + 1. `methods`: by boundary."""
    for boundary, method in methods.items():
        if boundary in segments:
            yield f"boundary.{boundary}.sender", method.sender_state, method.load_sender_state
        if boundary + 1 in segments:
            yield f"boundary.{boundary}.receiver", method.receiver_state, method.load_receiver_state


def unshared(result: Tensor, source: Tensor) -> Tensor:
    """`result`, or a copy if `result` is a view of `source`, which its owner may overwrite."""
    return result.clone() if result.data_ptr() == source.data_ptr() else result


def _named(**parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{direction}.{name}": tensor for direction, part in parts.items() for name, tensor in part.items()}


def _part(state: Mapping[str, Tensor], direction: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{direction}."): tensor for name, tensor in state.items() if name.startswith(f"{direction}.")
    }
