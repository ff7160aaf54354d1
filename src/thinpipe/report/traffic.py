"""The bytes that crossed between processes, and what they would have been had every number crossed in bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinpipe.core.events import Step

_BF16_NBYTES = 2


@dataclass(frozen=True)
class Traffic:
    sent_nbytes: int
    dense_nbytes: int
    """The model's whole width in bfloat16, states forward and gradients back, over the same links. Ids not counted."""

    @property
    def ratio(self) -> float:
        return self.dense_nbytes / self.sent_nbytes if self.sent_nbytes else 1.0

    @property
    def in_words(self) -> str:
        """How much was sent: "19.7 times less than ..."."""
        dense = "a dense model in bfloat16 would have"
        if self.ratio > 1.05:
            return f"{self.ratio:.1f} times less than {dense}"
        return f"as much as {dense}" if self.ratio > 0.95 else f"{1 / self.ratio:.1f} times what {dense}"


def traffic_of(steps: Sequence[Step], *, dim: int, tokens_per_step: float) -> Traffic:
    """Of all links together."""
    crossings = sum(len(step.links) for step in steps)
    return Traffic(
        sent_nbytes=sum(link.nbytes for step in steps for link in step.links),
        dense_nbytes=round(crossings * tokens_per_step * dim * _BF16_NBYTES),
    )
