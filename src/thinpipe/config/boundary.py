"""Settings of a model's boundaries: number format and compression of states and gradients. Imports no torch."""

from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from thinpipe.core.errors import UserError

FormatName = Literal["fp32", "bf16", "int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Compression of one direction of a boundary: states (forward) or gradients (backward)."""

    kind: Literal["none", "topk", "quantise", "lowrank"] = "none"
    """Compressor. topk: only the values of largest magnitude. quantise: integers of 2 to 8 bits between the minimum and
    the maximum. lowrank: a truncated SVD. none: all values, in the number format boundary.forward or
    boundary.backward."""
    keep: float | None = None
    """topk: fraction of the values to send, for example 0.1."""
    per: Literal["sample", "token"] | None = None
    """topk, quantise: group of values within which the largest are selected, or which shares a quantisation range.
    None: sample."""
    reuse_mask: bool = False
    """topk, gradients only: send the gradient at the positions that top-k selected in the state, so that no positions
    are sent back."""
    format: FormatName | None = None
    """topk, lowrank: number format of the values sent. None: bf16."""
    bits: int | None = None
    """quantise: bits per value, 2 to 8."""
    tile: int | None = None
    """quantise: number of values that share a quantisation range, in place of `per`."""
    rotate: bool = False
    """quantise: apply a seeded Hadamard rotation to each token first, to spread outliers over all channels."""
    whole_channels: int | None = None
    """quantise: number of channels, those of largest magnitude in a message, that are sent whole in bf16 and are not
    quantised. For published models, which have a few giant channels."""
    whole_tokens: int | None = None
    """quantise: number of tokens at the beginning of every sample that are sent whole in bf16 and are not quantised.
    For published models, in which the first token is an outlier."""
    rank: int | None = None
    """lowrank: rank of the approximation."""
    feedback: Literal["none", "ef", "ef21", "aqsgd"] = "none"
    """Codec state that corrects for earlier compression errors. ef: error feedback, the sender adds the accumulated
    compression error to the next message. ef21: send the compressed change since the previous message. aqsgd (states
    only): send the compressed change since the same sample's previous visit."""


COMPRESSION_SETTINGS: dict[str, tuple[str, ...]] = {
    "none": (),
    "topk": ("keep", "per", "reuse_mask", "format"),
    "quantise": ("bits", "per", "tile", "rotate", "whole_channels", "whole_tokens"),
    "lowrank": ("rank", "format"),
}
"""Settings that apply to each kind of compression; the first is required. A new kind adds an entry here, in
`boundary.registry.COMPRESSORS` and in `boundary.sizes.MESSAGE_LAYOUTS`."""
_OWN_KINDS = tuple(COMPRESSION_SETTINGS)
"""Kinds that come with thinpipe; `register_compressor` adds others."""


_DIRECTIONS, _FORMATS = ("states", "gradients"), ("forward", "backward")
_OUTLIERS: dict[str, Any] = {"rotate": True, "whole_channels": 8, "whole_tokens": 1}
_INT8 = CompressionConfig(kind="quantise", bits=8, per="token", **_OUTLIERS)
_INT4 = CompressionConfig(kind="quantise", bits=4, tile=128, **_OUTLIERS)
PRESETS: dict[str, tuple[CompressionConfig, CompressionConfig]] = {
    "tuning": (_INT8, _INT8),
    "tuning-thin": (_INT4, _INT4),
}
"""States and gradients of each `boundary.preset` but "none". In 4 bits, tiles of 128 rotated values err a quarter less
than a range per token, for a sixteenth more bytes (benchmarks/published_boundaries.py)."""


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig:
    """Encoding of boundary messages: states from a segment to the next one, gradients back."""

    preset: Literal["none", "tuning", "tuning-thin"] | None = None
    """Settings for tuning a published model, in each direction that has none of its own. tuning: rotated 8 bits, with
    the first token and the 8 largest channels whole. tuning-thin: the same in 4 bits. none: no preset, also for a
    published model. None: the default of the model."""
    method: Literal["none", "subspace"] | None = None
    """Kind of state: subspace coordinates, or the dense vector (none). None: chosen to match the model."""
    forward: FormatName = "fp32"
    """Number format of states. fp32 is lossless for float32 and bfloat16 models; float64 states are rounded."""
    backward: FormatName = "fp32"
    """Number format of gradients. int8 and int4 use stochastic rounding, which is unbiased; bf16 rounds to nearest
    even."""
    states: CompressionConfig = field(default_factory=CompressionConfig)
    gradients: CompressionConfig = field(default_factory=CompressionConfig)
    at_inference: bool = True
    """Whether validation compresses states as training does. False: validation sends states in fp32."""
    store: Path | None = None
    """aqsgd: folder for temporary files that hold one state per training sample, deleted when the process exits. None:
    keep the states in memory."""

    def __post_init__(self) -> None:
        _refuse_unknown_choices(self, "boundary")
        self._fill_in_preset()
        for name, number_format in zip(_DIRECTIONS, _FORMATS, strict=True):
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
        if self.gradients.feedback == "aqsgd":
            raise UserError('boundary.gradients.feedback = "aqsgd" is for states: write "ef" or "ef21"')
        if self.store is not None and self.states.feedback != "aqsgd":
            raise UserError('boundary.store is for boundary.states.feedback = "aqsgd": leave it out')
        if not self.at_inference and self.states.kind == "none" and self.forward == "fp32":
            raise UserError("boundary.at_inference = false has no effect on uncompressed fp32 states: leave it out")

    def _fill_in_preset(self) -> None:
        """Gives the settings of the preset to each direction that has none, or has those of a preset it replaces."""
        if self.preset is None or self.preset == "none":
            return
        wanted, is_replaced = PRESETS[self.preset], (self.states, self.gradients) in PRESETS.values()
        for name, number_format, compression in zip(_DIRECTIONS, _FORMATS, wanted, strict=True):
            is_free = getattr(self, name) == CompressionConfig() and getattr(self, number_format) == "fp32"
            if is_free or is_replaced:
                object.__setattr__(self, name, compression)
        if self.states != wanted[0] and self.gradients != wanted[1]:
            raise UserError(
                f'boundary.preset = "{self.preset}" has no effect: states and gradients both have settings of their '
                "own: leave the preset out, or remove those of a direction"
            )

    def resolve_method(self, *, in_subspace: bool) -> Literal["none", "subspace"]:
        """The method in effect. `in_subspace`: whether the model's state is subspace coordinates.

        Raises UserError if `method` is set and does not match the model.
        """
        name = self.method or ("subspace" if in_subspace else "none")
        if (name == "subspace") != in_subspace:
            wanted = "a subspace model (set model.subspace.width)" if name == "subspace" else "a dense model"
            raise UserError(f"boundary.method {name!r} is for {wanted}: leave boundary.method out to get the right one")
        return name


def boundary_of_published_model(config: BoundaryConfig) -> BoundaryConfig:
    """What a run with a published model sends: the preset "tuning", unless something is set in [boundary]."""
    return BoundaryConfig(preset="tuning") if config == BoundaryConfig() else config


def refuse_registered_compressors(config: BoundaryConfig, where: str) -> None:
    """Raises UserError if a direction has a compressor of `register_compressor`, which `where` cannot know."""
    for compression in (config.states, config.gradients):
        refuse_registered_name(compression.kind, where)


def refuse_registered_name(kind: Any, where: str) -> None:
    """As `refuse_registered_compressors`, for one name."""
    if isinstance(kind, str) and kind in COMPRESSION_SETTINGS and kind not in _OWN_KINDS:
        raise UserError(
            f"the compressor {kind!r} was registered in this program, and {where} cannot know it: it is for a run in "
            "one process, given as boundary=BoundaryConfig(...), and for pipelines of your own"
        )


_NUMBERS: dict[type, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
}


def _refuse_unknown_choices(config: "BoundaryConfig | CompressionConfig", where: str) -> None:
    """Raises UserError for a setting that is not one of its choices: Python does not compare types."""
    for setting in fields(config):
        value = getattr(config, setting.name)
        choices = tuple(COMPRESSION_SETTINGS) if setting.name == "kind" else _choices(setting.type)
        if choices and value not in choices:
            raise UserError(f"{where}.{setting.name} is {value!r}: there are {', '.join(map(str, choices))}")
        for wanted, (kind, words) in _NUMBERS.items():
            if wanted in (get_args(setting.type) or (setting.type,)) and not isinstance(value, kind | None):
                raise UserError(f"{where}.{setting.name} is {value!r}: write {words}")
        if setting.name in ("states", "gradients"):
            if not isinstance(value, CompressionConfig):
                raise UserError(f"{where}.{setting.name} is {value!r}: write a CompressionConfig")
            _refuse_unknown_choices(value, f"{where}.{setting.name}")


def _choices(hint: Any) -> tuple[Any, ...]:
    """Values of a `Literal` type, with None for `Literal | None`; empty for another type."""
    members = (hint,) if get_origin(hint) is Literal else get_args(hint)
    chosen = [value for member in members if get_origin(member) is Literal for value in get_args(member)]
    return (*chosen, *([None] if chosen and type(None) in members else []))


def _refuse_without_effect(compression: CompressionConfig, where: str) -> None:
    known = COMPRESSION_SETTINGS[compression.kind]
    for setting in fields(compression):
        if setting.name in ("kind", "feedback", *known) or getattr(compression, setting.name) == setting.default:
            continue
        kinds = " or ".join(f'"{kind}"' for kind, names in COMPRESSION_SETTINGS.items() if setting.name in names)
        raise UserError(f'{where}.{setting.name} is for kind = {kinds}, not "{compression.kind}": leave it out')
    if compression.kind == "none":
        if compression.feedback != "none":
            raise UserError(f"{where}.feedback corrects errors of compression: set {where}.kind, or leave it out")
        return
    if compression.reuse_mask and (compression.keep is not None or compression.per is not None):
        raise UserError(f"{where}.reuse_mask takes keep and per of the states: leave them out")
    if known and getattr(compression, known[0]) is None and not compression.reuse_mask:
        raise UserError(f'{where}.kind = "{compression.kind}" needs {where}.{known[0]}')
    _refuse_out_of_range(compression, where)


def _refuse_out_of_range(compression: CompressionConfig, where: str) -> None:
    if compression.keep is not None and not 0 < compression.keep < 1:
        raise UserError(f"{where}.keep must lie between 0 and 1, not {compression.keep}: 0.1 keeps a tenth")
    if compression.bits is not None and not 2 <= compression.bits <= 8:
        raise UserError(f"{where}.bits must be 2 to 8, not {compression.bits}")
    if compression.tile is not None and compression.tile < 2:
        raise UserError(f"{where}.tile must be at least 2, not {compression.tile}")
    if compression.tile is not None and compression.per is not None:
        raise UserError(f"{where}.tile and {where}.per both say what shares a range: leave one out")
    for name in ("whole_channels", "whole_tokens"):
        whole = getattr(compression, name)
        if whole is not None and whole < 1:
            raise UserError(f"{where}.{name} must be at least 1, not {whole}: leave it out to quantise everything")
    if compression.rank is not None and compression.rank < 1:
        raise UserError(f"{where}.rank must be at least 1, not {compression.rank}")
