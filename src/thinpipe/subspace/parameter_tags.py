"""Tags on parameters: coordinates with respect to U, and matrices with orthonormal columns.

The coordinates tag names the axis of the K coordinates and the full width D. The optimiser reads it (one second moment
per row of the full matrix), and so does the change of basis (multiply along that axis). Tags are attributes of the
parameter, because optimisers and checkpoints see parameters, not modules.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Coordinates:
    """Tag of a coordinate parameter: `axis` has the K coordinates, `full_width` is D, the width of the full matrix."""

    axis: int
    full_width: int


def mark_coordinates(parameter: Tensor, *, axis: int, full_width: int) -> None:
    parameter.thinpipe_coordinates = Coordinates(axis, full_width)  # type: ignore[attr-defined]


def coordinates_of(parameter: Tensor) -> Coordinates | None:
    """The coordinates tag of a parameter; None for an ordinary parameter."""
    return getattr(parameter, "thinpipe_coordinates", None)


def mark_orthonormal(parameter: Tensor) -> None:
    """Tags a matrix whose columns the optimiser must keep orthonormal (`optim.stiefel`)."""
    parameter.thinpipe_orthonormal = True  # type: ignore[attr-defined]


def is_orthonormal(parameter: Tensor) -> bool:
    return getattr(parameter, "thinpipe_orthonormal", False)


def copy_mark(source: Tensor, target: Tensor) -> None:
    """Copies all tags to the parameter that replaces `source`, as when a meta parameter is materialised."""
    if (coordinates := coordinates_of(source)) is not None:
        mark_coordinates(target, axis=coordinates.axis, full_width=coordinates.full_width)
    if is_orthonormal(source):
        mark_orthonormal(target)
