"""Merges of a layer from files to files, some megabytes at a time: memory does not grow with the model.

A file of contributions or of an update holds what `formats.encode` makes of the layer's weights. A file of weights
holds them in float32 and, where there is momentum, the momentum of each. The numbers are those of `merge`, bit for bit:
pieces are whole blocks of the number format.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinpipe.core.errors import UserError
from thinpipe.core.safetensors_header import TensorPlace, create_safetensors, tensor_places
from thinpipe.rounds.formats import BLOCK, FormatError, NumberFormat, check, decode, encode, layout
from thinpipe.rounds.merge import OuterSettings, outer_step, weighted_sum

PIECE = 1 << 22
"""Numbers that are merged at a time: 16 MB in float32. A multiple of `BLOCK`."""
MOMENTUM = "outer_momentum"
"""Of a weight W: saved as W:outer_momentum."""
_TYPES = {torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8"}
_NUMPY: dict[str, npt.DTypeLike] = {"F32": "<f4", "I8": "i1", "U8": "u1"}
Shapes = Mapping[str, torch.Size]


def check_file(path: Path, shapes: Shapes, form: NumberFormat) -> None:
    """Raises FormatError unless this is a file of a contribution with these weights, and finite."""
    try:
        places = tensor_places(path)
    except UserError as error:
        raise FormatError(str(error)) from None
    expected = _layouts(shapes, form)
    if {name: (place.dtype, place.shape) for name, place in places.items()} != expected:
        raise FormatError(f"{path.name} does not hold the weights of its layer as {form}")
    for name, shape in shapes.items():
        for begin, end in _pieces(shape.numel()):
            check(_encoded_piece(places, name, begin, end, form), {name: torch.Size((end - begin,))}, form)


def merge_layer(
    contributions: Sequence[tuple[int, Path]],
    weights: Path,
    shapes: Shapes,
    *,
    form: NumberFormat,
    update_form: NumberFormat,
    outer: OuterSettings,
    round_number: int,
    to_update: Path,
    to_weights: Path,
) -> None:
    """Merges contributions of one layer, each with its number of samples, in this order: writes the update, and the
    weights after it. The files of the contributions must have passed `check_file`."""
    sources = [(samples, tensor_places(path)) for samples, path in contributions]
    held = tensor_places(weights)
    update = create_safetensors(to_update, _layouts(shapes, update_form))
    moments = {f"{name}:{MOMENTUM}": shape for name, shape in shapes.items()} if outer.momentum else {}
    kept = {name: ("F32", tuple(shape)) for name, shape in {**shapes, **moments}.items()}
    moved = create_safetensors(to_weights, kept)
    for name, shape in shapes.items():
        for begin, end in _pieces(shape.numel()):
            piece = {name: torch.Size((end - begin,))}
            mean = weighted_sum(
                (samples, decode(_encoded_piece(places, name, begin, end, form), piece, form))
                for samples, places in sources
            )
            encoded = encode(mean, update_form)
            for key, tensor in encoded.items():
                _write(update[key], _start(begin, key, name, update_form), tensor)
            now = {name: _read(held[name], begin, end)}
            momentum = f"{name}:{MOMENTUM}"
            momenta = {name: _read(held[momentum], begin, end)} if momentum in held else {}
            outer_step(now, momenta, decode(encoded, piece, update_form), outer, round_number)
            _write(moved[name], begin, now[name])
            if momentum in moved:
                _write(moved[momentum], begin, momenta[name])


def _pieces(numel: int) -> list[tuple[int, int]]:
    return [(begin, min(numel, begin + PIECE)) for begin in range(0, numel, PIECE)]


def _layouts(shapes: Shapes, form: NumberFormat) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        name + key: (_TYPES[dtype], tuple(size))
        for name, shape in shapes.items()
        for key, (dtype, size) in layout(shape, form).items()
    }


def _encoded_piece(
    places: Mapping[str, TensorPlace], name: str, begin: int, end: int, form: NumberFormat
) -> dict[str, Tensor]:
    """What encodes the numbers from `begin` to `end` of a weight."""
    found = {}
    for key, (_, size) in layout(torch.Size((end - begin,)), form).items():
        start = _start(begin, name + key, name, form)
        found[name + key] = _read(places[name + key], start, start + size.numel()).view(size)
    return found


def _start(begin: int, key: str, name: str, form: NumberFormat) -> int:
    """Position in the tensor `key` of what encodes a weight `name` from its number `begin` on."""
    if form == "fp32":
        return begin
    blocks = begin // BLOCK
    return blocks if key != name else blocks * (BLOCK // 2 if form == "int4" else BLOCK)


def _read(place: TensorPlace, begin: int, end: int) -> Tensor:
    dtype = np.dtype(_NUMPY[place.dtype])
    numbers = np.fromfile(place.path, dtype, count=end - begin, offset=place.offset + begin * dtype.itemsize)
    return torch.from_numpy(numbers)


def _write(place: TensorPlace, begin: int, values: Tensor) -> None:
    numbers = values.flatten().numpy()
    with place.path.open("r+b") as file:
        file.seek(place.offset + begin * numbers.itemsize)
        numbers.tofile(file)
