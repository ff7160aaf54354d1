"""Settings of the boundaries of a model. No torch here."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from thinpipe.core.errors import UserError

FormatName = Literal["fp32", "bf16", "int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How one direction is made shorter than its numbers in a number format."""

    kind: Literal["none", "topk", "quantise", "lowrank"] = "none"
    """topk: the largest numbers only. quantise: integers of 2 to 8 bits between the least and the largest number.
    lowrank: a product of two thin matrices. none: every number, in the number format of [boundary]."""
    keep: float | None = None
    """topk: the share of the numbers that crosses, for example 0.1."""
    per: Literal["sample", "token"] | None = None
    """topk, quantise: choose the largest, or span the range, over a whole sample or over each token. None: sample."""
    reuse_mask: bool = False
    """topk of gradients: those of the numbers that crossed forward, so that no positions travel back."""
    format: FormatName | None = None
    """topk, lowrank: number format of what crosses. None: bf16."""
    bits: int | None = None
    """quantise: of each number, 2 to 8."""
    tile: int | None = None
    """quantise: span the range over so many numbers instead."""
    rotate: bool = False
    """quantise: after a seeded rotation of each token, which spreads its few large numbers over all."""
    rank: int | None = None
    """lowrank: columns of the two matrices."""
    memory: Literal["none", "ef", "ef21", "aqsgd"] = "none"
    """What is remembered of earlier messages. ef: the sender adds what compression has cost so far. ef21: only the
    change since the last message is sent. aqsgd (states only): the change since the same sample came last."""


KINDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "topk": ("keep", "per", "reuse_mask", "format"),
    "quantise": ("bits", "per", "tile", "rotate"),
    "lowrank": ("rank", "format"),
}
"""What means something to a kind; it cannot do without the first. A kind of yours adds a line here, and one to
`boundary.registry.COMPRESSORS`."""


@dataclass(frozen=True, kw_only=True)
class BoundarySection:
    """How the state crosses from one segment to the next, and its gradient back."""

    method: Literal["none", "subspace"] | None = None
    """What the state is. None: `subspace` for a subspace model and `none` for a dense one."""
    forward: FormatName = "fp32"
    """Number format of the state. fp32 is exact for float32 and bfloat16 models; a float64 model is rounded to it."""
    backward: FormatName = "fp32"
    """Number format of its gradient. int8 and int4 are rounded at random, so that the mean is right."""
    states: Compression = field(default_factory=Compression)
    gradients: Compression = field(default_factory=Compression)
    at_inference: bool = True
    """Validation sends what training sends. False: it sends the state in fp32."""
    store: Path | None = None
    """aqsgd: a folder with room for one state of every sample, in files that end with the process. None: in memory."""

    def __post_init__(self) -> None:
        for name, number_format in (("states", "forward"), ("gradients", "backward")):
            _refuse_without_effect(getattr(self, name), f"boundary.{name}")
            if getattr(self, name).kind != "none" and getattr(self, number_format) != "fp32":
                raise UserError(
                    f'boundary.{number_format} is for boundary.{name}.kind = "none": leave it out (what topk and '
                    f"lowrank send is in boundary.{name}.format)"
                )
        if self.states.reuse_mask:
            raise UserError("boundary.states.reuse_mask: the mask is that of the states: set it in boundary.gradients")
        if self.gradients.reuse_mask and self.states.kind != "topk":
            raise UserError(
                'boundary.gradients.reuse_mask needs a mask: set boundary.states.kind = "topk", or leave it out'
            )
        if self.gradients.memory == "aqsgd":
            raise UserError('boundary.gradients.memory = "aqsgd" is for states: write "ef" or "ef21"')
        if self.store is not None and self.states.memory != "aqsgd":
            raise UserError('boundary.store is for boundary.states.memory = "aqsgd": leave it out')
        if not self.at_inference and self.states.kind == "none" and self.forward == "fp32":
            raise UserError("boundary.at_inference = false: states cross whole as it is: leave it out")

    def method_for(self, *, confined: bool) -> Literal["none", "subspace"]:
        """`confined` says that the state is coordinates in a subspace."""
        name = self.method or ("subspace" if confined else "none")
        if (name == "subspace") != confined:
            wanted = "a subspace model (set model.subspace.width)" if name == "subspace" else "a dense model"
            raise UserError(f"boundary.method {name!r} is for {wanted}: leave boundary.method out to get the right one")
        return name


def _refuse_without_effect(asked: Compression, where: str) -> None:
    known = KINDS[asked.kind]
    for setting in fields(asked):
        if setting.name in ("kind", "memory", *known) or getattr(asked, setting.name) == setting.default:
            continue
        kinds = " or ".join(f'"{kind}"' for kind, names in KINDS.items() if setting.name in names)
        raise UserError(f'{where}.{setting.name} is for kind = {kinds}, not "{asked.kind}": leave it out')
    if asked.kind == "none":
        if asked.memory != "none":
            raise UserError(f"{where}.memory is of what compression leaves out: set {where}.kind, or leave it out")
        return
    if asked.reuse_mask and (asked.keep is not None or asked.per is not None):
        raise UserError(f"{where}.reuse_mask takes keep and per of the states: leave them out")
    if known and getattr(asked, known[0]) is None and not asked.reuse_mask:
        raise UserError(f'{where}.kind = "{asked.kind}" needs {where}.{known[0]}')
    _refuse_out_of_range(asked, where)


def _refuse_out_of_range(asked: Compression, where: str) -> None:
    if asked.keep is not None and not 0 < asked.keep < 1:
        raise UserError(f"{where}.keep must lie between 0 and 1, not {asked.keep}: 0.1 keeps a tenth")
    if asked.bits is not None and not 2 <= asked.bits <= 8:
        raise UserError(f"{where}.bits must be 2 to 8, not {asked.bits}")
    if asked.tile is not None and asked.tile < 2:
        raise UserError(f"{where}.tile must be at least 2, not {asked.tile}")
    if asked.tile is not None and asked.per is not None:
        raise UserError(f"{where}.tile and {where}.per both say what shares a range: leave one out")
    if asked.rank is not None and asked.rank < 1:
        raise UserError(f"{where}.rank must be at least 1, not {asked.rank}")
