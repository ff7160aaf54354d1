"""Optimiser state in host memory (`training.offload`): what is on the device at a time. Imports no torch.

The update takes state to the device in batches, through two buffers: while one batch is updated, the next arrives and
the one before returns. A parameter whose state is larger than a buffer is updated in slices of rows (first axis).
"""

from collections.abc import Sequence
from typing import Literal

from thinpipe.config.precision import Recipe

Offload = Literal["none", "optimizer"]

BUFFER_NBYTES = 1 << 25
"""Bytes of a buffer: copies of some megabytes already run at the full rate of a bus. A buffer is larger only if a
parameter that cannot be sliced needs it."""
BUFFERS = 2
ALIGNED_ROWS = 256
"""Slices begin at multiples of this many rows, so that numbers that a CPU kernel computes in one vector, or that share
a scale, are in one slice (up to 256 numbers that follow each other). A kernel may round the last numbers of a tensor,
which fill no vector, in another way: they are the last of the last slice too, and bits do not depend on slices."""


def keeps_masters(offload: Offload, recipe: Recipe, schedule: str) -> bool:
    """True if the matrices of blocks are bfloat16 copies on the device, with float32 masters in host memory (except
    subspace coordinates). Not under ZBVZeroBubble: torch adds up gradients of a split backward pass in their own data
    type."""
    return offload == "optimizer" and recipe.autocast_bf16 and schedule != "ZBVZeroBubble"


def batches_of_rows(states: Sequence[tuple[int, int]]) -> list[list[tuple[int, range]]]:
    """Batches of (index in `states`, rows), in order.

    `states`: rows and bytes per row of the state of each parameter; one row if it cannot be sliced.
    """
    batches: list[list[tuple[int, range]]] = []
    free_nbytes = 0
    for index, (n_rows, row_nbytes) in enumerate(states):
        slice_rows = max(1, BUFFER_NBYTES // max(1, row_nbytes) // ALIGNED_ROWS) * ALIGNED_ROWS
        for start in range(0, n_rows, slice_rows):
            rows = range(start, min(start + slice_rows, n_rows))
            nbytes = len(rows) * row_nbytes
            if not batches or nbytes > free_nbytes:
                batches.append([])
                free_nbytes = BUFFER_NBYTES
            batches[-1].append((index, rows))
            free_nbytes -= nbytes
    return batches


def streamed_nbytes(states: Sequence[tuple[int, int]]) -> int:
    """Bytes of the buffers on the device during an update; `states` as for `batches_of_rows`."""
    batches = batches_of_rows(states)
    largest = max((sum(len(rows) * states[index][1] for index, rows in batch) for batch in batches), default=0)
    return min(BUFFERS, len(batches)) * largest
