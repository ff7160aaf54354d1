"""Which compressions are tried: every kind, direction and strength of arXiv 2401.07788, one at a time."""

from dataclasses import dataclass, replace
from typing import Literal

from thinpipe.boundary.settings import BoundarySection, Compression

Kind = Literal["none", "topk", "quantise"]
Where = Literal["activations", "gradients", "both", "both, one mask"]
Memory = Literal["none", "ef", "ef21", "aqsgd"]

KEPT = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
KEPT_WITH_MEMORY = KEPT[:-1]
BITS = (8, 6, 4, 2)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What crosses all boundaries of one training."""

    kind: Kind = "none"
    where: Where = "both"
    """What is compressed. "both, one mask": gradients cross where their activations did."""
    level: float = 1
    """topk: the share that is kept. quantise: bits."""
    memory: Memory = "none"
    """ef and ef21: of both directions, but of activations alone with one mask. aqsgd: of activations alone."""

    @property
    def level_name(self) -> str:
        return {"none": "all", "topk": f"{self.level:.0%}", "quantise": f"{self.level:g} bits"}[self.kind]

    @property
    def name(self) -> str:
        if self.kind == "none":
            return "uncompressed"
        memory = "" if self.memory == "none" else f" + {self.memory}"
        return f"{self.kind}{memory} {self.level_name}, {self.where}"

    @property
    def boundary(self) -> BoundarySection:
        activations = self._leg if self.where != "gradients" else Compression()
        gradients = self._leg if self.where != "activations" else Compression()
        if self.where == "both, one mask":
            gradients = Compression(kind="topk", reuse_mask=True, format="fp32")
        if self.memory == "aqsgd":
            gradients = replace(gradients, memory="none")
        return BoundarySection(states=activations, gradients=gradients)

    @property
    def _leg(self) -> Compression:
        """What is kept crosses in fp32: only the compression is to be seen."""
        if self.kind == "topk":
            return Compression(kind="topk", keep=self.level, format="fp32", memory=self.memory)
        if self.kind == "quantise":
            return Compression(kind="quantise", bits=int(self.level), memory=self.memory)
        return Compression()


def kept_with(memory: Memory, where: Where) -> tuple[float, ...]:
    """With one mask, no more than what the claims of the paper are about."""
    return KEPT_WITH_MEMORY if where == "both" else {"aqsgd": (0.3, 0.2)}.get(memory, (0.1,))


UNCOMPRESSED = Setting()
WHERE: tuple[Where, ...] = ("activations", "gradients", "both")
BOTH: tuple[Where, ...] = ("both", "both, one mask")
MEMORIES: tuple[Memory, ...] = ("ef", "ef21", "aqsgd")
SETTINGS = (
    UNCOMPRESSED,
    *(Setting(kind="topk", where=where, level=keep) for where in (*WHERE, "both, one mask") for keep in KEPT),
    *(Setting(kind="quantise", where=where, level=bits) for where in WHERE for bits in BITS),
    *(
        Setting(kind="topk", where=where, level=keep, memory=memory)
        for where in BOTH
        for memory in MEMORIES
        for keep in kept_with(memory, where)
    ),
)
