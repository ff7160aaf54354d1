"""Bytes sent between processes, compared with sending uncompressed states and gradients in bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinpipe.core.events import Step
from thinpipe.core.units import BF16_NBYTES


@dataclass(frozen=True)
class TrafficTotals:
    """Traffic over all boundaries and steps."""

    sent_nbytes: int
    """Payload bytes sent."""
    dense_nbytes: int
    """Bytes of full-width states and gradients in bfloat16 over the same boundaries, without token ids."""

    @property
    def ratio(self) -> float:
        """Compression ratio: dense bytes per byte sent."""
        return self.dense_nbytes / self.sent_nbytes if self.sent_nbytes else 1.0

    @property
    def description(self) -> str:
        """Ratio in words: "19.7 times less than ..."."""
        dense = "a dense model in bfloat16 would have"
        if self.ratio > 1.05:
            return f"{self.ratio:.1f} times less than {dense}"
        return f"as much as {dense}" if self.ratio > 0.95 else f"{1 / self.ratio:.1f} times what {dense}"


def traffic_of(steps: Sequence[Step], *, dim: int, tokens_per_step: float) -> TrafficTotals:
    """Traffic of these steps, all boundaries and directions together."""
    n_messages = sum(len(step.links) for step in steps)
    return TrafficTotals(
        sent_nbytes=sum(link.nbytes for step in steps for link in step.links),
        dense_nbytes=round(n_messages * tokens_per_step * dim * BF16_NBYTES),
    )
