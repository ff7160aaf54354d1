"""What boundary methods remember between steps, in files of their own: `boundary.N.sender` and `boundary.N.receiver`.

The process with the segment before a boundary is its sender, the one with the segment after it its receiver; whoever is
one writes and reads that file, so nothing depends on how many processes there are. Most methods remember nothing.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod
from thinpipe.checkpoint.folder import Checkpoint
from thinpipe.core.errors import UserError


def memories(methods: Sequence[BoundaryMethod], segments: Collection[int]) -> dict[str, dict[str, Tensor]]:
    """By the name of the file; for a process that has these segments."""
    states = {layer: state() for layer, state, _ in _parts(methods, segments)}
    return {layer: state for layer, state in states.items() if state}


def restore_memories(checkpoint: Checkpoint, methods: Sequence[BoundaryMethod], segments: Collection[int]) -> None:
    kept = memories(methods, segments)
    for layer, _, load in _parts(methods, segments):
        if layer not in kept:
            continue
        if not checkpoint.has(layer):
            raise UserError(
                f"{checkpoint.path} has no {layer}: it was saved from a run whose boundaries remember nothing; go on "
                "with its [boundary], or begin a new run with model.initial"
            )
        try:
            load(checkpoint.layer(layer))
        except UserError as error:
            raise UserError(f"{checkpoint.path}, {layer}: {error}") from None


def segment_of_memory(layer: str) -> int | None:
    """Whose process writes this file; None for other files."""
    match layer.split("."):
        case ["boundary", number, "sender"]:
            return int(number)
        case ["boundary", number, "receiver"]:
            return int(number) + 1
    return None


_Part = tuple[str, Callable[[], dict[str, Tensor]], Callable[[Mapping[str, Tensor]], None]]


def _parts(methods: Sequence[BoundaryMethod], segments: Collection[int]) -> Iterator[_Part]:
    for boundary, method in enumerate(methods):
        if boundary in segments:
            yield f"boundary.{boundary}.sender", method.sender_state, method.load_sender_state
        if boundary + 1 in segments:
            yield f"boundary.{boundary}.receiver", method.receiver_state, method.load_receiver_state
