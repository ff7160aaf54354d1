"""Marks the parameters that hold coordinates with respect to U.

The mark says which axis has the K coordinates and how wide the full matrix would be. The optimiser reads it (one
second moment per row of the full matrix) and so does the change of basis (multiply along that axis). A mark lives on
the parameter, because parameters are what optimisers and checkpoints see.
"""

from dataclasses import dataclass

from torch import Tensor

from thinpipe.subspace.stiefel import is_orthonormal, mark_orthonormal


@dataclass(frozen=True)
class Coordinates:
    """`axis` runs over the K coordinates; `full_width` is D, the length of the vector they stand for."""

    axis: int
    full_width: int


def mark_coordinates(parameter: Tensor, *, axis: int, full_width: int) -> None:
    parameter.thinpipe_coordinates = Coordinates(axis, full_width)  # type: ignore[attr-defined]


def coordinates_of(parameter: Tensor) -> Coordinates | None:
    """None for an ordinary parameter."""
    return getattr(parameter, "thinpipe_coordinates", None)


def copy_mark(source: Tensor, target: Tensor) -> None:
    """Carries the mark over when a parameter object is replaced, as materialising a meta parameter does."""
    if (coordinates := coordinates_of(source)) is not None:
        mark_coordinates(target, axis=coordinates.axis, full_width=coordinates.full_width)
    if is_orthonormal(source):
        mark_orthonormal(target)
