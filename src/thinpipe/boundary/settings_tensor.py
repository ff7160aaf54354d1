"""Settings as a tensor, JSON as uint8: in codec state, and in the message by which two stages compare what they were
made with."""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from thinpipe.config.toml import differences
from thinpipe.core.errors import UserError


def settings_tensor(settings: Mapping[str, Any], nbytes: int = 0) -> Tensor:
    """uint8, filled up with spaces to at least `nbytes`."""
    return torch.tensor(list(msgspec.json.encode(settings).ljust(nbytes)), dtype=torch.uint8)


def changed_settings(other: Tensor, here: Mapping[str, Any]) -> str:
    """How the settings of a tensor differ from those here, as "seed 6 -> 5; ..."; empty if they do not.

    Raises UserError if the tensor holds no settings.
    """
    try:
        found = msgspec.json.decode(bytes(other.tolist()), type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
        raise UserError("there are no settings of a boundary where they are expected") from None
    return "; ".join(f"{setting} {change}" for setting, change in differences(found, dict(here)).items())
