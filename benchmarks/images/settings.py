"""Which compressions are tried: every kind, direction and strength of arXiv 2401.07788, one at a time."""

from dataclasses import replace
from typing import Literal

import msgspec

from thinpipe.config.boundary import BoundaryConfig, CompressionConfig

Kind = Literal["none", "topk", "quantise"]
Where = Literal["activations", "gradients", "both", "both, one mask"]
Feedback = Literal["none", "ef", "ef21", "aqsgd"]

KEPT = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
KEPT_WITH_FEEDBACK = KEPT[:-1]
BITS = (8, 6, 4, 2)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What crosses all boundaries of one training."""

    kind: Kind = "none"
    where: Where = "both"
    """What is compressed. "both, one mask": gradients cross where their activations did."""
    level: float = 1
    """topk: the share that is kept. quantise: bits."""
    feedback: Feedback = msgspec.field(name="memory", default="none")
    """ef and ef21: of both directions, but of activations alone with one mask. aqsgd: of activations alone."""

    @property
    def level_name(self) -> str:
        return {"none": "all", "topk": f"{self.level:.0%}", "quantise": f"{self.level:g} bits"}[self.kind]

    @property
    def name(self) -> str:
        if self.kind == "none":
            return "uncompressed"
        feedback = "" if self.feedback == "none" else f" + {self.feedback}"
        return f"{self.kind}{feedback} {self.level_name}, {self.where}"

    @property
    def boundary(self) -> BoundaryConfig:
        activations = self._compression if self.where != "gradients" else CompressionConfig()
        gradients = self._compression if self.where != "activations" else CompressionConfig()
        if self.where == "both, one mask":
            gradients = CompressionConfig(kind="topk", reuse_mask=True, format="fp32")
        if self.feedback == "aqsgd":
            gradients = replace(gradients, feedback="none")
        return BoundaryConfig(states=activations, gradients=gradients)

    @property
    def _compression(self) -> CompressionConfig:
        """What is kept crosses in fp32: only the compression is to be seen."""
        if self.kind == "topk":
            return CompressionConfig(kind="topk", keep=self.level, format="fp32", feedback=self.feedback)
        if self.kind == "quantise":
            return CompressionConfig(kind="quantise", bits=int(self.level), feedback=self.feedback)
        return CompressionConfig()


def kept_with(feedback: Feedback, where: Where) -> tuple[float, ...]:
    """With one mask, no more than what the claims of the paper are about."""
    return KEPT_WITH_FEEDBACK if where == "both" else {"aqsgd": (0.3, 0.2)}.get(feedback, (0.1,))


UNCOMPRESSED = Setting()
WHERE: tuple[Where, ...] = ("activations", "gradients", "both")
BOTH: tuple[Where, ...] = ("both", "both, one mask")
FEEDBACKS: tuple[Feedback, ...] = ("ef", "ef21", "aqsgd")
SETTINGS = (
    UNCOMPRESSED,
    *(Setting(kind="topk", where=where, level=keep) for where in (*WHERE, "both, one mask") for keep in KEPT),
    *(Setting(kind="quantise", where=where, level=bits) for where in WHERE for bits in BITS),
    *(
        Setting(kind="topk", where=where, level=keep, feedback=feedback)
        for where in BOTH
        for feedback in FEEDBACKS
        for keep in kept_with(feedback, where)
    ),
)
