"""What every boundary method promises: exact lengths, both directions, and the same numbers wherever it runs.

The contract test holds every method, format and schedule in the registries to it: N processes give the bits of one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.boundary.ids import id_nbytes, pack_ids, unpack_ids
from thinpipe.core.seeds import derive_seed


@dataclass(frozen=True, kw_only=True)
class MessageShape:
    """One micro-batch at one boundary; known to both ends before anything is sent."""

    batch: int
    tokens: int
    """Tokens of a sample that have a state; one more id travels, the label of the last."""
    width: int
    """Numbers per token in the state."""
    vocab_size: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def ids_nbytes(self) -> int:
        return self.batch * (self.tokens + 1) * id_nbytes(self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Which micro-batch of which step crosses which boundary: all that randomness may depend on."""

    seed: int
    step: int
    microbatch: int
    boundary: int

    def uniform(self, shape: torch.Size, direction: str) -> Tensor:
        """The same numbers on every device and in every process: drawn on the CPU."""
        words = (self.seed, self.step, self.microbatch, self.boundary, direction)
        generator = torch.Generator().manual_seed(derive_seed(*words))
        return torch.rand(shape, generator=generator)


class BoundaryMethod(ABC):
    """Encodes and decodes the state going forward and its gradient going back.

    Token ids travel forward behind the state, whose numbers thus stay aligned. Methods that keep something between
    steps will say so here; the first ones keep nothing.
    """

    def __init__(self, shape: MessageShape) -> None:
        self.shape = shape

    @property
    @abstractmethod
    def state_nbytes(self) -> int:
        """Bytes of an encoded state, without the ids."""

    @property
    @abstractmethod
    def gradient_nbytes(self) -> int: ...

    @abstractmethod
    def encode_state(self, state: Tensor, crossing: Crossing) -> Tensor:
        """uint8, [state_nbytes]."""

    @abstractmethod
    def decode_state(self, data: Tensor, crossing: Crossing) -> Tensor: ...

    @abstractmethod
    def encode_gradient(self, gradient: Tensor, crossing: Crossing) -> Tensor: ...

    @abstractmethod
    def decode_gradient(self, data: Tensor, crossing: Crossing) -> Tensor: ...

    @property
    def forward_nbytes(self) -> int:
        return self.shape.ids_nbytes + self.state_nbytes

    @property
    def backward_nbytes(self) -> int:
        return self.gradient_nbytes

    @torch.no_grad()
    def pack_forward(self, ids: Tensor, state: Tensor, crossing: Crossing) -> Tensor:
        """The whole message: the state, then the ids."""
        message = torch.cat((self.encode_state(state.detach(), crossing), pack_ids(ids, self.shape.vocab_size)))
        return self._of_length(message, self.forward_nbytes)

    @torch.no_grad()
    def unpack_forward(self, message: Tensor, crossing: Crossing) -> tuple[Tensor, Tensor]:
        message = self._of_length(message, self.forward_nbytes)
        packed_ids = message[self.state_nbytes :]
        ids = unpack_ids(packed_ids, (self.shape.batch, self.shape.tokens + 1), self.shape.vocab_size)
        return ids, self.decode_state(message[: self.state_nbytes], crossing)

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
