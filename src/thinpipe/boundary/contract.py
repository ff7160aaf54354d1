"""What every boundary method promises: exact lengths, both directions, and the same numbers wherever it runs.

A method is two legs, one for states and one for gradients; a leg is a compressor and what it keeps between messages.
The contract test holds every method, format and schedule in the registries to it: N processes give the bits of one.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.boundary.formats import Uniform
from thinpipe.boundary.ids import pack_ids, unpack_ids
from thinpipe.boundary.lengths import MessageSize
from thinpipe.core.seeds import derive_seed


@dataclass(frozen=True, kw_only=True)
class MessageShape(MessageSize):
    """And what the numbers are at both ends."""

    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Which micro-batch of which step crosses which boundary: all that randomness may depend on."""

    seed: int
    step: int
    microbatch: int
    boundary: int
    training: bool = True
    """False in validation, of which no method remembers anything."""

    def uniform(self, shape: torch.Size, direction: str) -> Tensor:
        """The same numbers on every device and in every process: drawn on the CPU."""
        words = (self.seed, self.step, self.microbatch, self.boundary, direction)
        generator = torch.Generator().manual_seed(derive_seed(*words))
        return torch.rand(shape, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Passage:
    """What both ends know of a message before it is sent."""

    training: bool
    uniform: Uniform | None = None
    """For rounding gradients at random; None: states are rounded to nearest."""
    ids_BW: Tensor | None = None
    """Of a state."""
    kept: Tensor | None = None
    """Of a gradient: where its state had the numbers that were sent, if it is to be sent there only."""


class Compressor(ABC):
    """A tensor to bytes and back. Keeps nothing, so that one end can tell what the other will see."""

    nbytes: int
    """Of every message, as `lengths` says it."""

    @abstractmethod
    def encode(self, values_BTW: Tensor, passage: Passage) -> Tensor:
        """float32 to uint8, [nbytes]."""

    @abstractmethod
    def decode(self, data: Tensor, passage: Passage) -> Tensor:
        """float32, [B, T, W]."""


class Leg:
    """One direction of a boundary. This one remembers nothing.

    What others remember is kept apart for the end that encodes and the end that decodes: in one process both are here,
    in two each has its own. They rely on the order of messages: in every schedule, and in the twin, micro-batches cross
    a boundary one after the other, each direction by itself.
    """

    def __init__(self, compressor: Compressor, shape: MessageShape, store: Path | None = None) -> None:
        """`store` is a folder for what is too much for memory."""
        self.compressor, self.shape, self.store = compressor, shape, store

    def encode(self, values_BTW: Tensor, passage: Passage) -> Tensor:
        return self.compressor.encode(values_BTW, passage)

    def decode(self, data: Tensor, passage: Passage) -> Tensor:
        return self.compressor.decode(data, passage)

    def mark(self) -> None:
        """A step begins."""

    def go_back(self) -> None:
        """Forgets all since the mark: the step does not count."""

    def encoder_state(self) -> dict[str, Tensor]:
        return {}

    def decoder_state(self) -> dict[str, Tensor]:
        return {}

    def load_encoder_state(self, state: Mapping[str, Tensor]) -> None:
        pass

    def load_decoder_state(self, state: Mapping[str, Tensor]) -> None:
        pass


class BoundaryMethod:
    """Encodes and decodes the state going forward and its gradient going back.

    Token ids travel forward behind the state, whose numbers thus stay aligned. The *sender* is the process with the
    segment before the boundary: it encodes states and decodes gradients. The *receiver* has the segment after it. What
    a leg remembers is in the process that plays the part, and in both parts' own attributes where one plays both.
    """

    def __init__(
        self, shape: MessageShape, states: Leg, gradients: Leg, *, at_inference: "BoundaryMethod | None" = None
    ) -> None:
        self.shape, self.states, self.gradients = shape, states, gradients
        self.at_inference = at_inference or self
        """What carries states in validation."""

    @property
    def forward_nbytes(self) -> int:
        return self.shape.ids_nbytes + self.states.compressor.nbytes

    @property
    def backward_nbytes(self) -> int:
        return self.gradients.compressor.nbytes

    def encode_state(self, state: Tensor, ids_BW: Tensor, crossing: Crossing) -> Tensor:
        """uint8, without the ids."""
        return self.states.encode(state.float(), Passage(training=crossing.training, ids_BW=ids_BW))

    def decode_state(self, data: Tensor, ids_BW: Tensor, crossing: Crossing) -> Tensor:
        state = self.states.decode(data, Passage(training=crossing.training, ids_BW=ids_BW))
        return state.to(self.shape.dtype)

    def encode_gradient(self, gradient: Tensor, crossing: Crossing) -> Tensor:
        return self.gradients.encode(gradient.float(), self._backward(crossing))

    def decode_gradient(self, data: Tensor, crossing: Crossing) -> Tensor:
        return self.gradients.decode(data, self._backward(crossing)).to(self.shape.dtype)

    def _backward(self, crossing: Crossing, kept: Tensor | None = None) -> Passage:
        def uniform(shape: torch.Size) -> Tensor:
            return crossing.uniform(shape, "backward")

        return Passage(training=crossing.training, uniform=uniform, kept=kept)

    @torch.no_grad()
    def pack_forward(self, ids_BW: Tensor, state: Tensor, crossing: Crossing) -> Tensor:
        """The whole message: the state, then the ids."""
        encoded = self.encode_state(state.detach(), ids_BW, crossing)
        message = torch.cat((encoded, pack_ids(ids_BW, self.shape.vocab_size)))
        return self._of_length(message, self.forward_nbytes)

    @torch.no_grad()
    def unpack_forward(self, message: Tensor, crossing: Crossing) -> tuple[Tensor, Tensor]:
        message = self._of_length(message, self.forward_nbytes)
        state_nbytes = self.states.compressor.nbytes
        ids_shape = (self.shape.batch, self.shape.tokens + 1)
        ids_BW = unpack_ids(message[state_nbytes:], ids_shape, self.shape.vocab_size)
        return ids_BW, self.decode_state(message[:state_nbytes], ids_BW, crossing)

    @torch.no_grad()
    def pack_backward(self, gradient: Tensor, crossing: Crossing) -> Tensor:
        return self._of_length(self.encode_gradient(gradient, crossing), self.backward_nbytes)

    @torch.no_grad()
    def unpack_backward(self, message: Tensor, crossing: Crossing) -> Tensor:
        return self.decode_gradient(self._of_length(message, self.backward_nbytes), crossing)

    def _of_length(self, message: Tensor, nbytes: int) -> Tensor:
        if message.dtype != torch.uint8 or message.numel() != nbytes:
            raise ValueError(f"a message of {message.numel()} x {message.dtype}, but {nbytes} bytes were stated")
        return message

    def mark(self) -> None:
        """A step begins: `go_back` forgets all that was learnt since."""
        self.states.mark()
        self.gradients.mark()

    def go_back(self) -> None:
        self.states.go_back()
        self.gradients.go_back()

    def sender_state(self) -> dict[str, Tensor]:
        """What the sender remembers between steps; nothing, or the same names from the first step to the last."""
        return _named(states=self.states.encoder_state(), gradients=self.gradients.decoder_state())

    def receiver_state(self) -> dict[str, Tensor]:
        return _named(states=self.states.decoder_state(), gradients=self.gradients.encoder_state())

    def load_sender_state(self, state: Mapping[str, Tensor]) -> None:
        self.states.load_encoder_state(_part(state, "states"))
        self.gradients.load_decoder_state(_part(state, "gradients"))

    def load_receiver_state(self, state: Mapping[str, Tensor]) -> None:
        self.states.load_decoder_state(_part(state, "states"))
        self.gradients.load_encoder_state(_part(state, "gradients"))


def _named(**parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{leg}.{name}": tensor for leg, part in parts.items() for name, tensor in part.items()}


def _part(state: Mapping[str, Tensor], leg: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{leg}."): tensor for name, tensor in state.items() if name.startswith(f"{leg}.")}
