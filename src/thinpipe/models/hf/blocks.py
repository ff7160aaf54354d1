"""Blocks of a Hugging Face model as a segment runs them: its own take the state in and out, the others pass it on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinpipe.core.seeds import derive_seed
from thinpipe.models.hf.counter_dropout import CounterDropout


@dataclass
class Pass:
    """What one pass through a segment takes in and gives out; one object for all passes of a segment."""

    state: Tensor | None = None
    """State of the segment before; None in the first segment."""
    output: Any = None
    """What the last own block has returned: a tensor, or a tuple with the tensor first, as its model wants it."""
    dropout_seed: int | None = None
    checkpoints_blocks: bool = False
    output_class: Any = None
    """transformers' class of what the decoder returns to its head."""

    @property
    def output_state(self) -> Tensor:
        state: Tensor = self.output[0] if isinstance(self.output, tuple) else self.output
        return state


class _StandIn(nn.Module):
    """Stands in a model's list for a block, with the block's attributes, which the loop over the blocks may read. The
    block is no part of this module."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "block", block)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "block"), name)


class OtherSegmentsBlock(_StandIn):
    """Block of another segment: passes on the state before the own blocks, and their output after them.

    Whether the model's loop takes a tensor or the first part of a tuple: before the own blocks, what it makes of the
    state is not used, and after them it gets what it got from the last own block.
    """

    def __init__(self, block: nn.Module, running: Pass) -> None:
        super().__init__(block)
        self.running = running

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.running.state if self.running.output is None else self.running.output


class OwnBlock(_StandIn):
    """Block of this segment."""

    def __init__(self, block: nn.Module, running: Pass, index: int, *, is_first: bool) -> None:
        super().__init__(block)
        self.running, self.index, self.is_first = running, index, is_first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        running, seed = self.running, self.running.dropout_seed
        if "hidden_states" in kwargs:
            args = (kwargs.pop("hidden_states"), *args)
        hidden, *others = args
        if self.is_first and running.state is not None:
            hidden = running.state

        def run(hidden: Tensor) -> Any:
            if seed is None:
                return self.block(hidden, *others, **kwargs)
            with CounterDropout(derive_seed(seed, self.index)):  # here: also when the block is computed again
                return self.block(hidden, *others, **kwargs)

        if running.checkpoints_blocks and torch.is_grad_enabled():
            running.output = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            running.output = run(hidden)
        return running.output
