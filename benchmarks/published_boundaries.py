"""What boundaries make of states with giant channels, as published models have:
`python -m benchmarks.published_boundaries`.

The states are synthetic: normal numbers; in four channels 60 times as large; in two more a massive value at the first
token and at one other token of each sample, as a delimiter has (arXiv 2402.17762: a few values of 1,000 and more where
others are about 1). Errors are relative, on ordinary channels alone: what is left of what a model says beside its
giants. Half a minute on one core. What tuning loses through boundaries is measured by `benchmarks.tuning_boundaries`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from benchmarks.command_line import run_benchmark
from benchmarks.message_sizes import nbytes_per_token
from benchmarks.provenance import versions
from thinpipe.boundary.contract import MessageContext, MessageShape
from thinpipe.boundary.registry import COMPRESSORS
from thinpipe.boundary.sizes import MessageSize, OutliersLayout
from thinpipe.config.boundary import PRESETS, BoundaryConfig, CompressionConfig

STEADY, MASSIVE = 4, 2
"""Numbers of giant channels: those of every token, and those of two tokens of a sample."""
DELIMITER = 17
"""The other token with massive values."""
VOCABULARY = 128_256
WIDTHS = (1024, 4096, 8192)
INT8 = CompressionConfig(kind="quantise", bits=8, per="token")
ENCODINGS = {
    "int8": INT8,
    "int8, rotated": replace(INT8, rotate=True),
    "int4, rotated": CompressionConfig(kind="quantise", bits=4, per="token", rotate=True),
    "int4, rotated, tiles of 128": CompressionConfig(kind="quantise", bits=4, tile=128, rotate=True),
}
WHOLE = {
    "nothing": {},
    "first token": {"whole_tokens": 1},
    "8 channels": {"whole_channels": 8},
    "first token, 8 channels": {"whole_tokens": 1, "whole_channels": 8},
}
BOUNDARIES = {
    "fp32": BoundaryConfig(),
    "bf16": BoundaryConfig(forward="bf16", backward="bf16"),
    **{f'preset = "{name}"': BoundaryConfig(preset=name) for name in PRESETS},  # type: ignore[arg-type]
}


@dataclass(frozen=True, kw_only=True)
class PublishedBoundaries:
    width: int = 4096
    tokens: int = 512
    """Per sample; a message has one sample."""
    seeds: int = 3
    output: Path | None = None
    """Folder for the page of results; None: print only."""


@dataclass(frozen=True)
class Errors:
    """Relative errors on ordinary channels."""

    first: float
    """Of the first token."""
    others: float
    """Mean of all other tokens."""
    worst: float
    """Of the other token with the largest error."""


def states(width: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """States of one sample, and which channels are ordinary."""
    generator = torch.Generator().manual_seed(seed)
    values_BTW = torch.randn(1, tokens, width, generator=generator)
    giants = torch.randperm(width, generator=generator)[: STEADY + MASSIVE]
    values_BTW[:, :, giants[:STEADY]] *= 60
    for token in (0, DELIMITER):
        values_BTW[:, token, giants[STEADY:]] = torch.tensor([1200.0, -900.0])
    return values_BTW, torch.ones(width, dtype=torch.bool).index_fill(0, giants, False)


def measure(settings: CompressionConfig, *, width: int, tokens: int, seed: int) -> Errors:
    values_BTW, ordinary_W = states(width, tokens, seed)
    shape = MessageShape(batch=1, tokens=tokens, width=width, vocab_size=VOCABULARY, dtype=torch.float32)
    compressor, context = COMPRESSORS[settings.kind](shape, settings, seed), MessageContext(training=True)
    decoded_BTW = compressor.decode(compressor.encode(values_BTW, context), context)
    sent_TW = values_BTW[0][:, ordinary_W]
    errors_T = (decoded_BTW[0][:, ordinary_W] - sent_TW).norm(dim=1) / sent_TW.norm(dim=1)
    return Errors(float(errors_T[0]), float(errors_T[1:].mean()), float(errors_T[1:].max()))


def error_table(options: PublishedBoundaries) -> Iterator[str]:
    size = MessageSize(batch=1, tokens=options.tokens, width=options.width, vocab_size=VOCABULARY)
    yield from (
        f"Width {options.width:,}, {options.tokens} tokens, mean of {options.seeds} seeds. Bytes of one direction, "
        "without ids.",
        "",
        "| encoding | whole | bytes a token | first token | other tokens | the worst of them |",
        "|---|---|---:|---:|---:|---:|",
    )
    for name, encoding in ENCODINGS.items():
        for whole, fields in WHOLE.items():
            settings = replace(encoding, **fields)  # type: ignore[arg-type]
            found = [
                measure(settings, width=options.width, tokens=options.tokens, seed=seed)
                for seed in range(options.seeds)
            ]
            columns = (mean(getattr(errors, column) for errors in found) for column in ("first", "others", "worst"))
            yield (
                f"| {name} | {whole} | {OutliersLayout(size, settings).nbytes / size.rows:,.1f} | "
                + " | ".join(f"{column:.4f}" for column in columns)
                + " |"
            )


def byte_table(tokens: int) -> Iterator[str]:
    """Both directions, with ids, for messages of one sample."""
    yield from (
        f"Both directions with token ids (vocabulary {VOCABULARY:,}), messages of one sample of {tokens} tokens.",
        "",
        "| bytes a token at a boundary | " + " | ".join(f"width {width:,}" for width in WIDTHS) + " |",
        "|---|" + "---:|" * len(WIDTHS),
    )
    for name, boundary in BOUNDARIES.items():
        sizes = (MessageSize(batch=1, tokens=tokens, width=width, vocab_size=VOCABULARY) for width in WIDTHS)
        yield f"| {name} | " + " | ".join(f"{nbytes_per_token(boundary, size):,.0f}" for size in sizes) + " |"


def page(options: PublishedBoundaries) -> str:
    lines = (
        "# Boundaries for states with giant channels",
        "",
        "```",
        "python -m benchmarks.published_boundaries --output benchmarks/results",
        "```",
        "",
        "Synthetic states (the command's docstring says which). No published model was measured.",
        "",
        "## Relative error on ordinary channels",
        "",
        *error_table(options),
        "",
        "## Bytes",
        "",
        *byte_table(options.tokens),
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()) + ".",
        "",
    )
    return "\n".join(lines)


def run(options: PublishedBoundaries) -> None:
    text = page(options)
    print(text)
    if options.output is not None:
        (options.output / "published_boundaries.md").write_text(text)


if __name__ == "__main__":
    raise SystemExit(run_benchmark("published_boundaries", PublishedBoundaries, run))
