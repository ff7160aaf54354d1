"""Figures that were measured on this machine, by device, which replace assumptions of the cost model.

`thinpipe selftest` writes them, `thinpipe plan`, the check of memory before a run, and peers read them: one JSON file
in the user's state folder. A figure that is None was not measured. Imports no torch.

The file: {"format": 1, "devices": {"cuda: NVIDIA GeForce RTX 3060": {"overhead_nbytes": 512000000, ...}}}.
"""

import logging
from pathlib import Path
from typing import Annotated

import msgspec

from thinpipe.config.model_family import AttentionKernel
from thinpipe.core.errors import DECODE_ERRORS
from thinpipe.core.files import write_atomically
from thinpipe.core.state_folder import state_folder

_LOG = logging.getLogger(__name__)
_FORMAT = 1

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Calibration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measured figures of one device of this machine."""

    overhead_nbytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Bytes of memory that a process takes beside tensors: context and libraries on an accelerator; on a CPU the
    resident set of a process before it has tensors."""
    fragmentation_share: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    """Part of the memory reserved by the allocator at the peak of a step that no tensor uses: 1 - allocated /
    reserved."""
    activation_factor: Positive | None = None
    """Measured peak of a step's activations, temporary tensors included, divided by the predicted."""
    flops: dict[str, Positive] = {}
    """Sustained FLOP/s of training steps, by the name of the precision recipe."""
    to_device_bytes_per_second: Positive | None = None
    """Copies from pinned host memory to the device."""
    to_host_bytes_per_second: Positive | None = None
    """Copies from the device to pinned host memory."""
    attention: AttentionKernel | None = None
    """Kernel of causal attention with grouped queries."""
    torch: str = ""
    """Version of torch with which the figures were measured."""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    format: int = _FORMAT
    devices: dict[str, Calibration] = {}


def device_key(kind: str, name: str) -> str:
    """Key of a device in the file: torch's name of its type, and the vendor's name of the device."""
    return f"{kind}: {name}"


def load_calibrations() -> dict[str, Calibration]:
    """All calibrations of this machine, by `device_key`. A file that cannot be read counts as none, with a warning."""
    path = calibration_path()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return {}
    except (OSError, *DECODE_ERRORS) as error:
        _LOG.warning("%s is ignored: %s. `thinpipe selftest` makes a new one", path, error)
        return {}
    if found.format != _FORMAT:
        _LOG.warning("%s is ignored: format %d, and this version reads %d", path, found.format, _FORMAT)
        return {}
    return found.devices


def save_calibration(key: str, calibration: Calibration) -> Path:
    """Replaces the calibration of one device; returns the path of the file. Raises OSError."""
    path = calibration_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _File(devices={**load_calibrations(), key: calibration})
    write_atomically(path, msgspec.json.format(msgspec.json.encode(file), indent=2))
    return path


def calibration_path() -> Path:
    return state_folder() / "calibration.json"
