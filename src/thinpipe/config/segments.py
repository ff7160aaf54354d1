"""Cutting a model into segments at block indices, the same for models of every kind."""

from collections.abc import Sequence
from itertools import pairwise

from thinpipe.core.errors import UserError


def segments_between(boundaries: Sequence[int], n_layers: int) -> tuple[range, ...]:
    """Block indices of each segment: boundaries (2, 4) make the segments blocks 0-1, 2-3 and 4 to the end."""
    return tuple(range(*edges) for edges in pairwise((0, *boundaries, n_layers)))


def refuse_wrong_boundaries(boundaries: Sequence[int], n_layers: int) -> None:
    """Raises UserError unless each segment has at least one block."""
    segments = segments_between(boundaries, n_layers)
    if not all(segments):
        raise UserError(
            f"boundaries {list(boundaries)} must rise strictly between 1 and {n_layers - 1}, "
            f"so that each of the {len(segments)} segments has at least one of the {n_layers} blocks"
        )
