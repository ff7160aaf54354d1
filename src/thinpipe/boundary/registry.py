"""What boundaries are made of, by name.

Adding a compressor or a memory is a file and a line here; the contract test asks for a case of every one.
"""

from collections.abc import Callable
from pathlib import Path

from thinpipe.boundary.aqsgd import AqSgd
from thinpipe.boundary.contract import BoundaryMethod, Compressor, Leg, MessageShape
from thinpipe.boundary.feedback import Ef21, ErrorFeedback
from thinpipe.boundary.lowrank import LowRank
from thinpipe.boundary.mask import Masked, MaskedMethod
from thinpipe.boundary.plain import make_none, make_subspace
from thinpipe.boundary.quantise import Quantise
from thinpipe.boundary.settings import BoundarySection, Compression, FormatName
from thinpipe.boundary.topk import TopK

METHODS: dict[str, Callable[[MessageShape, FormatName, int], Compressor]] = {
    "none": make_none,
    "subspace": make_subspace,
}
"""Every number, in a number format."""

COMPRESSORS: dict[str, Callable[[MessageShape, Compression, int], Compressor]] = {
    "topk": TopK,
    "quantise": Quantise,
    "lowrank": LowRank,
}

MEMORIES: dict[str, Callable[[Compressor, MessageShape, Path | None], Leg]] = {
    "none": Leg,
    "ef": ErrorFeedback,
    "ef21": Ef21,
    "aqsgd": AqSgd,
}


def make_method(settings: BoundarySection, shape: MessageShape, *, confined: bool, seed: int) -> BoundaryMethod:
    """The method of one boundary; both ends make it from the same settings.

    `confined` says that the state is coordinates in a subspace.
    """
    name = settings.method_for(confined=confined)

    def compressor(asked: Compression, number_format: FormatName) -> Compressor:
        if asked.kind == "none":
            return METHODS[name](shape, number_format, seed)
        return COMPRESSORS[asked.kind](shape, asked, seed)

    states = compressor(settings.states, settings.forward)
    if settings.gradients.reuse_mask:
        assert isinstance(states, TopK)
        gradients: Compressor = Masked(states, settings.gradients.format or "bf16")
    else:
        gradients = compressor(settings.gradients, settings.backward)
    kind = MaskedMethod if settings.gradients.reuse_mask else BoundaryMethod
    return kind(
        shape,
        MEMORIES[settings.states.memory](states, shape, settings.store),
        MEMORIES[settings.gradients.memory](gradients, shape, None),
        at_inference=None if settings.at_inference else _whole(name, shape, seed),
    )


def _whole(name: str, shape: MessageShape, seed: int) -> BoundaryMethod:
    leg = Leg(METHODS[name](shape, "fp32", seed), shape)
    return BoundaryMethod(shape, leg, leg)
