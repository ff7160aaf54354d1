"""Registries of number formats, compressors and feedback codecs by name, and `make_method`, which combines them.

A new compressor or feedback codec needs a module and an entry here; the contract test requires a test case for each.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from thinpipe.boundary.aqsgd import AqSgd
from thinpipe.boundary.contract import BoundaryMethod, Compressor, DirectionCodec, MessageShape
from thinpipe.boundary.error_feedback import Ef21, ErrorFeedback
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.lowrank import LowRank
from thinpipe.boundary.number_format import make_dense_compressor, make_subspace_compressor
from thinpipe.boundary.outliers import make_quantise
from thinpipe.boundary.reused_mask import MaskedCompressor, ReusedMaskMethod
from thinpipe.boundary.topk import TopK
from thinpipe.config.boundary import COMPRESSION_SETTINGS, BoundaryConfig, CompressionConfig, FormatName
from thinpipe.core.errors import UserError

FORMAT_COMPRESSORS: dict[str, Callable[[MessageShape, FormatName, int], Compressor]] = {
    "none": make_dense_compressor,
    "subspace": make_subspace_compressor,
}
"""Compressors for kind "none", which send all values in a number format, by boundary method."""

COMPRESSORS: dict[str, Callable[[MessageShape, CompressionConfig, int], Compressor]] = {
    "topk": TopK,
    "quantise": make_quantise,
    "lowrank": LowRank,
}

FEEDBACKS: dict[str, Callable[[Compressor, MessageShape, Path | None], DirectionCodec]] = {
    "none": DirectionCodec,
    "ef": ErrorFeedback,
    "ef21": Ef21,
    "aqsgd": AqSgd,
}


def register_compressor(
    name: str, compressor: Callable[[MessageShape, CompressionConfig, int], Compressor], settings: tuple[str, ...] = ()
) -> None:
    """Makes a compressor of your own known in this program by `name`, for `CompressionConfig(kind=name)` and `codec`.

    `compressor` is called with the shape of the messages, the settings and a seed that both ends share, and returns a
    `Compressor`. `settings` are the fields of `CompressionConfig` that apply to it; the first is required. The name is
    for a run in one process, whose settings have a `BoundaryConfig` object, and for pipelines of your own, where every
    process registers it: processes that `train` starts, files, dictionaries of settings and `plan` do not know it.
    A class that is defined anew, as by a cell of a notebook that is run again, replaces the old one. Numbers of your
    own come with `functools.partial`, under a name for each: `register_compressor("mine-3", partial(Mine, levels=3))`.
    Raises UserError if the name is taken by another compressor, or a setting is no field of `CompressionConfig`.
    """
    if not callable(compressor):
        raise UserError(f"{compressor!r} makes no compressor: write the class, or a function that returns one")
    if name in ("none", *FORMATS) or _place(COMPRESSORS.get(name, compressor)) != _place(compressor):
        raise UserError(f"there is already a compressor named {name!r}: choose another name")
    if unknown := {*settings} - {field.name for field in fields(CompressionConfig)}:
        raise UserError(
            f"{', '.join(sorted(unknown))}: no field of CompressionConfig, and compressors have no other settings: "
            "register functools.partial(YourClass, ...) under a name for each value"
        )
    COMPRESSORS[name], COMPRESSION_SETTINGS[name] = compressor, settings


def _place(compressor: Any) -> Any:
    """Module and name of a class or function, the same when it is defined anew; of others the object itself."""
    compressor = compressor.func if isinstance(compressor, partial) else compressor
    name = getattr(compressor, "__qualname__", None)
    return (compressor.__module__, name) if name is not None and "<" not in name else compressor


def make_method(settings: BoundaryConfig, shape: MessageShape, *, in_subspace: bool, seed: int) -> BoundaryMethod:
    """The codec of one boundary. Sender and receiver each make their own, from the same settings and seed.

    `in_subspace`: whether the state is subspace coordinates.
    """
    name = settings.resolve_method(in_subspace=in_subspace)

    def compressor(compression: CompressionConfig, number_format: FormatName) -> Compressor:
        if compression.kind == "none":
            return FORMAT_COMPRESSORS[name](shape, number_format, seed)
        return COMPRESSORS[compression.kind](shape, compression, seed)

    states = compressor(settings.states, settings.forward)
    if settings.gradients.reuse_mask:
        assert isinstance(states, TopK)
        gradients: Compressor = MaskedCompressor(states, settings.gradients.format or "bf16")
    else:
        gradients = compressor(settings.gradients, settings.backward)
    kind = ReusedMaskMethod if settings.gradients.reuse_mask else BoundaryMethod
    return kind(
        shape,
        FEEDBACKS[settings.states.feedback](states, shape, settings.store),
        FEEDBACKS[settings.gradients.feedback](gradients, shape, None),
        at_inference=None if settings.at_inference else _uncompressed_method(name, shape, seed),
    )


def _uncompressed_method(name: str, shape: MessageShape, seed: int) -> BoundaryMethod:
    codec = DirectionCodec(FORMAT_COMPRESSORS[name](shape, "fp32", seed), shape)
    return BoundaryMethod(shape, codec, codec)
