"""Settings of `python -m benchmarks.step`. No torch here, so that `--help` can show them at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinpipe.core.errors import UserError

HEAD_DIM = 64
"""Width of an attention head: dim must be a multiple of it."""
MIN_PAIRS = 6
"""With fewer, even the whole range of the ratios holds their median with less than 95 % confidence."""


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Time and peak memory of one training step: a subspace Llama against the dense one.

    Step times come from interleaved pairs in one process; memory from a fresh process for every reading. The last line
    of output is JSON and holds everything that was measured.
    """

    dim: int = 1024
    """Model width d, a multiple of 64. The dense MLP is 8/3 d wide, rounded up to a multiple of 256."""
    layers: int = 4
    """Blocks of the model."""
    vocab: int = 8192
    """Rows of the embedding and of the head."""
    tokens: int = 2048
    """Tokens per timed step; the batch is tokens / sequence length."""
    seqs: tuple[int, ...] = (256, 512, 1024, 2048)
    """Sequence lengths, each a divisor of tokens."""
    compressions: tuple[int, ...] = (100, 8)
    """Subspace widths as divisors of dim: 100 stands for k = d/100."""
    pairs: int = 10
    """Pairs of steps per comparison: an even number, at least 6."""
    warmup: int = 1
    """Untimed steps of each variant before the pairs of every comparison."""
    memory_batch: int = 1
    """Batch size at which memory is compared over the sequence lengths."""
    threads: int | None = None
    """CPU threads; None: what torch chooses."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the steps run."""
    bf16: bool = False
    """Matrix products in bfloat16 (autocast)."""
    json: Path | None = None
    """Also write the JSON line to this file."""
    figure: Path | None = None
    """Draw the result to this file (needs the extra `report`)."""

    def __post_init__(self) -> None:
        if self.dim < HEAD_DIM or self.dim % HEAD_DIM:
            raise UserError(f"--dim {self.dim} must be a positive multiple of {HEAD_DIM}, the width of a head")
        for name in ("layers", "vocab", "tokens", "memory_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if not self.seqs or any(seq < 1 or self.tokens % seq for seq in self.seqs):
            raise UserError(f"every one of --seqs {list(self.seqs)} must divide --tokens {self.tokens}")
        if list(self.seqs) != sorted(set(self.seqs)):
            raise UserError(f"--seqs {list(self.seqs)} must rise")
        if not self.compressions or any(divisor < 1 for divisor in self.compressions):
            raise UserError(f"--compressions {list(self.compressions)} must be one or more numbers of at least 1")
        if self.pairs < MIN_PAIRS or self.pairs % 2:
            raise UserError(f"--pairs must be even and at least {MIN_PAIRS}, not {self.pairs}")
        if self.warmup < 1:
            raise UserError("--warmup must be at least 1: the first step also allocates the optimiser's state")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"--threads must be at least 1, not {self.threads}")

    def width(self, compression: int) -> int:
        """k for one of the compressions, at least 1."""
        return max(1, self.dim // compression)
