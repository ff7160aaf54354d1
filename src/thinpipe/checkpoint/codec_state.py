"""Codec state of boundary methods (kept between steps) in checkpoints, as layers `boundary.N.sender` and
`boundary.N.receiver`.

The process with segment N writes and reads the sender layer of boundary N, the process with segment N + 1 the receiver
layer, so checkpoints do not depend on the number of processes. Most methods have no state, and no such layers.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod, codec_state_parts
from thinpipe.checkpoint.storage import Checkpoint
from thinpipe.core.errors import UserError
from thinpipe.core.hashing import array_sha256


def codec_states(methods: Sequence[BoundaryMethod], segments: Collection[int]) -> dict[str, dict[str, Tensor]]:
    """Codec state tensors by layer name, for a process with these segments; methods without state are left out."""
    states = {layer: state() for layer, state, _ in codec_state_parts(dict(enumerate(methods)), segments)}
    return {layer: state for layer, state in states.items() if state}


def restore_codec_states(checkpoint: Checkpoint, methods: Sequence[BoundaryMethod], segments: Collection[int]) -> None:
    """Loads the codec state of a process with these segments. Raises UserError if it is missing or does not fit."""
    present = codec_states(methods, segments)
    for layer, _, load in codec_state_parts(dict(enumerate(methods)), segments):
        if layer not in present:
            continue
        if not checkpoint.has(layer):
            raise UserError(
                f"{checkpoint.path} has no {layer}: it was saved from a run whose boundary codecs have no state; go on "
                "with its [boundary], or begin a new run with model.initial"
            )
        try:
            load(checkpoint.layer(layer))
        except UserError as error:
            raise UserError(f"{checkpoint.path}, {layer}: {error}") from None


def codec_state_hashes(layers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, str]]:
    """sha256 of every tensor of the codec state among these layers, by layer and name."""
    return {
        layer: {name: array_sha256(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}
        for layer, tensors in layers.items()
        if segment_of_codec_state(layer) is not None
    }


def refuse_drift(hashes: Mapping[str, Mapping[str, str]], step: int) -> None:
    """Raises UserError if the ends of a boundary differ in codec state that both have, such as EF21's copy: then the
    receiver decodes other numbers than the sender means. `hashes`: as `codec_state_hashes`, of all processes."""
    for layer, sent in hashes.items():
        boundary, _, end = layer.rpartition(".")
        received = hashes.get(f"{boundary}.receiver", {}) if end == "sender" else {}
        for name in sent.keys() & received.keys():
            if sent[name] != received[name]:
                raise UserError(
                    f"the two ends of {boundary} no longer have the same {name} at step {step}: their devices decode "
                    "differently. Nothing was saved; go on from the checkpoint before with a feedback that has no copy "
                    "at both ends (boundary.states.feedback, boundary.gradients.feedback: none or ef), or on devices "
                    "of one class"
                )


def segment_of_codec_state(layer: str) -> int | None:
    """Segment whose process writes this layer; None if the layer is not codec state."""
    match layer.split("."):
        case ["boundary", number, "sender"]:
            return int(number)
        case ["boundary", number, "receiver"]:
            return int(number) + 1
    return None
