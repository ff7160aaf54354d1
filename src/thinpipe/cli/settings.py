"""Settings of the verbs that have no part of their own. No torch here: `--help` shows them at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinpipe.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Perplexity and bits per byte of a trained model on the validation text."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, or one checkpoint."""
    data: Path | None = None
    """Folder made by `thinpipe tokenize`. Default: the one the run was trained on."""
    seq_len: int | None = None
    """Tokens per window. Default: that of the training."""
    batch_size: int = 8
    """Windows at a time."""
    max_batches: int = 0
    """Only so many, spread evenly over the text; 0: all of it."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, not {self.batch_size}")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Continue a text with a trained model, token by token."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, or one checkpoint."""
    prompt: str = "The "
    """The text to continue."""
    max_new_tokens: int = 100
    """Stop after so many, or where the text ends."""
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_p: float = 0.95
    """Only the likeliest tokens that together have this probability."""
    seed: int = 0
    """Another seed draws other tokens."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError("--prompt must not be empty")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a trained model as a Hugging Face folder: a plain dense model that `transformers` loads."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, or one checkpoint."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The folder to make."""


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Turn a Hugging Face folder (Llama or GPT-2) into a checkpoint that `thinpipe train` starts from."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A Hugging Face folder with safetensors weights."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The folder to make; give it to `thinpipe train` as --model.initial."""
    boundaries: tuple[int, ...] = ()
    """Cuts between blocks."""
    subspace_width: int | None = None
    """Cast the model into a subspace of this width, which changes it: the cost is printed."""
    free_last: bool = True
    """Leave the blocks after the last boundary as they are (with --subspace-width)."""
    data: Path | None = None
    """Folder made by `thinpipe tokenize` with the model's tokenizer: where the cost of a cast is measured."""

    def __post_init__(self) -> None:
        if self.subspace_width is None and (self.data is not None or not self.free_last):
            raise UserError("--data and --no-free-last are for a cast: give --subspace-width, or leave them out")
        if self.subspace_width is not None and self.free_last and not self.boundaries:
            raise UserError(
                "--free-last leaves the blocks after the last cut free: give --boundaries, or --no-free-last"
            )
        if self.subspace_width is not None and self.data is None:
            raise UserError(
                "a cast into a subspace changes the model: give --data, a folder made by "
                "`thinpipe tokenize --tokenizer SOURCE`, so that its cost can be measured and printed"
            )


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Make a page of how a run went, from its event log: HTML in one file, and Markdown. The run may still be going."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run."""
    against: tuple[Path, ...] = ()
    """Other runs to compare it with: loss over time, speed, and what the difference costs in loss."""
    sample: str | None = None
    """Let the newest checkpoint continue this text, and show it."""
    output: Path | None = None
    """The folder to write. Default: report in the run's folder."""

    def __post_init__(self) -> None:
        if self.sample == "":
            raise UserError("--sample must not be empty: give the beginning of a text")
