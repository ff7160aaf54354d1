"""What a run came to, as plain text: floats in hexadecimal, tensors as the SHA-256 of their bytes."""

import json
from pathlib import Path

from safetensors.torch import load_file

from tests.golden.arithmetic import bytes_sha256
from thinpipe.checkpoint import find_checkpoint
from thinpipe.checkpoint.codec_state import segment_of_codec_state
from thinpipe.checkpoint.storage import layer_of
from thinpipe.core.events import BasisChanged, Step, Validated, read_events


def observe_run(folder: Path) -> dict:
    """Of a finished run: every step, validation and change of basis, and the tensors of its last checkpoint."""
    events = list(read_events(folder / "events.jsonl"))
    validations = by_step((event.step, [exact(event.loss)]) for event in events if isinstance(event, Validated))
    changes = by_step((event.step, exact_change(event)) for event in events if isinstance(event, BasisChanged))
    return {
        "steps": by_step((e.step, [exact(e.loss), exact(e.grad_norm)]) for e in events if isinstance(e, Step)),
        **({"validations": validations} if validations else {}),
        **({"basis_changes": changes} if changes else {}),
        "tensors": tensors_of(find_checkpoint(folder)),
    }


def by_step(observed) -> list:
    """In the order of steps. A step that was computed again, after somebody was lost, must have come to the same."""
    steps: dict[int, list] = {}
    for step, values in observed:
        assert steps.setdefault(step, values) == values, f"step {step} came to {steps[step]} and again to {values}"
    return [steps[step] for step in sorted(steps)]


def exact(number):
    """Floats as hexadecimal text; integers, truth values and None as they are."""
    return number.hex() if isinstance(number, float) else number


def exact_change(event: BasisChanged) -> list:
    angles = [event.largest_angle, event.mean_angle]
    norms = [event.orthonormality_error, event.kept_norm]
    return [exact(number) for number in (event.captured_energy, *angles, *norms, event.loss_before, event.loss_after)]


def tensors_of(checkpoint) -> dict[str, str]:
    """By name, in layer order; what boundaries remember has the same names at both ends, so its file is named."""
    found = {}
    for layer in sorted(map(layer_of, checkpoint.manifest.files), key=layer_order):
        prefix = "" if segment_of_codec_state(layer) is None else f"{layer}/"
        for name, tensor in checkpoint.layer(layer).items():
            assert f"{prefix}{name}" not in found, f"two tensors are called {prefix}{name}"
            found[f"{prefix}{name}"] = bytes_sha256(tensor)
    return found


def layer_order(layer: str) -> tuple:
    """For people who read the digests: a comparison looks tensors up by name."""
    kinds = ["first", "blocks", "projections", "last", "boundary", "run"]
    kind, *rest = layer.split(".")
    return (
        kinds.index(kind) if kind in kinds else len(kinds),
        [int(part) if part.isdigit() else 0 for part in rest],
        layer,
    )


def exported_tensors(folder: Path) -> dict[str, str]:
    """Of a Hugging Face folder."""
    return {name: bytes_sha256(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}


def figures_of(printed: str) -> dict:
    """Every number of a plan in JSON by its path. Words are for people, and may be put better; so is the order in which
    changes are advised."""
    plan, found = json.loads(printed), {}
    plan["changes"].sort(key=lambda change: -change["times_as_fast"])

    def walk(value, path: str) -> None:
        if isinstance(value, dict | list):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                walk(part, f"{path}.{key}" if path else str(key))
        elif not isinstance(value, str):
            found[path] = exact(value)

    walk(plan, "")
    return found
