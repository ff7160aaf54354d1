"""Precision recipes: which numbers a run computes with and stores. Imports no torch.

A recipe is named by `training.precision`. All sizes that follow from one are counted in `planning.segment_costs`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from thinpipe.core.errors import UserError
from thinpipe.core.units import ITEM_NBYTES

Precision = Literal["auto", "fp32", "bf16-mixed", "bf16", "fp64"]
DType = Literal["float32", "bfloat16", "float64"]
MOMENT_BLOCK, MOMENT_BLOCK_NBYTES = 128, 2
"""Numbers of an 8-bit moment that share a scale, and bytes of the scale."""
_MIN_EIGHT_BIT_NUMEL = 4096
DEVICE_SLICE = 1 << 22
"""Most numbers of a bfloat16 parameter that an accelerator updates at a time, in float32; enough to fill it. Slices are
of whole rows and whole blocks of moments."""
_SLICE_NBYTES = 37
"""Bytes on the device for each number of a slice, at the peak of its update: weights, gradient and moments in float32,
random bits, codes. Measured with the allocator of the tests' second device (benchmarks/memory_law.py)."""


def is_eight_bit(shape: Sequence[int], moment_numel: int) -> bool:
    """True if a moment with this many numbers, of a parameter of this shape, is one of those kept in 8 bits.
    Norms, biases, small matrices and row-wise second moments stay float32: few numbers, and sensitive ones."""
    return len(shape) > 1 and moment_numel == math.prod(shape) >= _MIN_EIGHT_BIT_NUMEL


def slice_rows(shape: Sequence[int], limit: int = DEVICE_SLICE) -> int:
    """Rows (first axis) of a bfloat16 parameter that are updated at a time: about `limit` numbers, and whole blocks of
    moments whatever the width of a row is."""
    return max(1, limit // max(1, math.prod(shape[1:])) // MOMENT_BLOCK) * MOMENT_BLOCK


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Data types of weights, states, matrix products and moments."""

    name: Precision
    weights: DType
    """Data type of weights, of the residual stream and of the states that cross boundaries."""
    autocast_bf16: bool = False
    """Compute matrix products in bfloat16 from weights that are kept in `weights` (torch's autocast)."""

    eight_bit_moments: bool = False
    """Keep the optimiser's moments of matrices in 8 bits, the others in float32. False: all in `weights`."""

    @property
    def uses_bf16(self) -> bool:
        return self.autocast_bf16 or self.weights == "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, and of its gradient."""
        return ITEM_NBYTES[self.weights]

    def moments_nbytes(self, shape: Sequence[int], second_moment_numel: int) -> int:
        """Bytes of both moments of a parameter."""
        return sum(self._moment_nbytes(shape, numel) for numel in (math.prod(shape), second_moment_numel))

    def update_nbytes(self, shapes: Iterable[Sequence[int]]) -> int:
        """Bytes that an accelerator needs beside weights, gradients and moments while it updates parameters of these
        shapes, one after the other."""
        if not self.eight_bit_moments:
            return 0
        return max(_SLICE_NBYTES * min(math.prod(shape), slice_rows(shape) * math.prod(shape[1:])) for shape in shapes)

    def _moment_nbytes(self, shape: Sequence[int], numel: int) -> int:
        if not self.eight_bit_moments:
            return numel * self.itemsize
        if not is_eight_bit(shape, numel):
            return numel * ITEM_NBYTES["float32"]
        return numel + -(-numel // MOMENT_BLOCK) * MOMENT_BLOCK_NBYTES


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="fp32", weights="float32"),
        Recipe(name="bf16-mixed", weights="float32", autocast_bf16=True),
        Recipe(name="bf16", weights="bfloat16", eight_bit_moments=True),
        Recipe(name="fp64", weights="float64"),
    )
}

AUTO_RECIPES: tuple[Precision, Precision] = ("fp32", "bf16-mixed")
"""Recipes that auto may choose: without and with units for bfloat16. Both keep the same weights and optimiser state."""


def recipe_names(weights: str) -> str:
    """Names of the recipes that keep weights of this data type, which may take turns in a run."""
    return " or ".join(recipe.name for recipe in RECIPES.values() if recipe.weights == weights)


def recipe_of(precision: Precision, *, has_bf16_units: bool | None, device: str) -> Recipe:
    """The recipe with which a device computes. auto: one of `AUTO_RECIPES`, which keep the same state, so the
    processes of one run may differ in it.

    `has_bf16_units`: None if it is not known. Raises UserError, with the name `device`, for a recipe with bfloat16 on a
    card without units for it, which would emulate them, many times slower.
    """
    recipe = RECIPES[AUTO_RECIPES[bool(has_bf16_units)] if precision == "auto" else precision]
    if has_bf16_units is False and recipe.uses_bf16:
        raise UserError(
            f"{device} has no units for bfloat16, so training.precision {precision!r} would be emulated: "
            'set training.precision = "fp32" (float16 with loss scaling is not supported)'
        )
    return recipe


def describe_choice(precision: Precision, recipe: Recipe, *, has_bf16_units: bool | None) -> str:
    """The recipe's name; for auto also why it was chosen."""
    if precision != "auto":
        return recipe.name
    units = {True: "units", False: "no units", None: "no known units"}[has_bf16_units]
    return f"{recipe.name} (auto: {units} for bfloat16)"
