"""Settings of the boundaries of a model. No torch here."""

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["fp32", "bf16", "int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class BoundarySection:
    """How the state crosses from one segment to the next, and its gradient back."""

    method: Literal["none", "subspace"] | None = None
    """What is sent. None: `subspace` for a subspace model and `none` for a dense one."""
    forward: FormatName = "fp32"
    """Number format of the state. fp32 is exact for float32 and bfloat16 models; a float64 model is rounded to it."""
    backward: FormatName = "fp32"
    """Number format of its gradient. int8 and int4 are rounded at random, so that the mean is right."""
