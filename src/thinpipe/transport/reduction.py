"""Arithmetic of an all-reduce, with one order of operations for every carrier: process groups (`collectives.py`) and
the hub (`swarm/hub/services/reduction.py`). Imports no torch: the hub needs none."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

ReduceOp = Literal["sum", "avg", "max", "min"]
MAX_NBYTES = 64 << 20
"""Maximum bytes of one collective: lengths announced by peers are untrusted and must not exhaust memory."""

_COMBINE = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum}


def reduce_rows(op: ReduceOp, rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Element-wise reduction of the rows of all processes, given in rank order: ((row 0 + row 1) + row 2) + ...

    The average is that sum, divided once. A NaN in any row makes the element NaN. The `sum(0)` of numpy and of torch
    would not do: the order of their additions depends on the shape.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # the caller judges values that are not finite
        total = np.asarray(reduce(_COMBINE[op], rows))
        return total / len(rows) if op == "avg" else total
