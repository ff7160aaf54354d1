"""Where the tokens of a run come from: one folder, or several in a mixture."""

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import tyro

from thinpipe.core.errors import UserError

_DEFAULT_PATH = Path("data/tokens")
MAX_CYCLE = 10_000


@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """Several folders of tokens in place of data.path, a table for each. Samples follow the weights from the first step
    on, and each folder is read in an order of its own, pass by pass."""

    path: Path
    """Folder of tokens, as written by `thinpipe tokenize`. All folders have the same tokenizer."""
    weight: float = 1.0
    """Samples from this folder, in proportion to the weights of the others."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UserError(f"data.mixture: the weight of {self.path} must be above 0, not {self.weight}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: Path = _DEFAULT_PATH
    """Folder of tokens, as written by `thinpipe tokenize`."""
    mixture: Annotated[tuple[MixtureSource, ...] | None, tyro.conf.AvoidSubcommands] = None
    """Several folders in place of path, each with a weight. None: path alone."""

    def __post_init__(self) -> None:
        if self.mixture is None:
            return
        if not self.mixture:
            raise UserError("data.mixture is empty: name its folders, or leave it out and set data.path")
        if self.path != _DEFAULT_PATH:
            raise UserError(f"data.path {self.path} and data.mixture exclude each other: leave one out")
        named = [source.path for source in self.mixture]
        twice = next((path for path in named if named.count(path) > 1), None)
        if twice is not None:
            raise UserError(f"data.mixture has {twice} twice: name it once, with both weights added up")
        if (cycle := sum(self.weights)) > MAX_CYCLE:
            raise UserError(
                f"the weights of data.mixture repeat after {cycle:,} samples, and at most {MAX_CYCLE:,} are possible: "
                "write them with fewer digits, for example 0.85 and 0.15"
            )

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.path,) if self.mixture is None else tuple(source.path for source in self.mixture)

    @property
    def weights(self) -> tuple[int, ...]:
        """Of the folders, as the smallest whole numbers."""
        given = [Fraction(str(source.weight)) for source in self.mixture or ()] or [Fraction(1)]
        scale = math.lcm(*(weight.denominator for weight in given))
        whole = [int(weight * scale) for weight in given]
        return tuple(weight // math.gcd(*whole) for weight in whole)

    @property
    def in_words(self) -> str:
        return ", ".join(map(str, self.folders))

    @property
    def only_folder(self) -> Path:
        """Raises UserError if there are several."""
        if self.mixture:
            raise UserError(f"the run was trained on a mixture: pass --data with one of its folders: {self.in_words}")
        return self.path
