"""Does rank collapse while a network learns, and is that a property of transformers? Five families, one loop.

    pip install -e ".[dev]"
    thinpipe tokenize --sources BOOKS... --validation-sources BOOKS... --output tokens --vocab-size 4096
    OMP_NUM_THREADS=1 python -m benchmarks.rank --data tokens --output benchmarks/results/rank
    python -m benchmarks.rank --output benchmarks/results/rank    (draws what OUTPUT.json holds again)

Llama and GPT-2 learn text; ViT, MLP-Mixer and ResNet learn digits. All have four segments, the same optimiser and the
same number of steps. Two things are followed: the matrices that write to the residual stream, and the stream of unseen
samples at each cut (tokens x width), whole and without its mean. Writes OUTPUT.json, OUTPUT.png and OUTPUT.md.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.provenance import plain_settings, versions
from benchmarks.rank.families import FAMILIES, Options
from benchmarks.rank.history import History, Moment, follow
from benchmarks.rank.report import write_report


@dataclass(frozen=True, kw_only=True)
class Results:
    options: dict[str, object]
    versions: dict[str, str]
    threads: int
    histories: list[History]


def measure(options: Options, data: Path) -> Results:
    histories: list[History] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("ETA"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        shown = progress.add_task("", total=options.steps * len(options.families))
        for index, name in enumerate(options.families):

            def show(moment: Moment, before: int = index * options.steps, name: str = name) -> None:
                text = f"{FAMILIES[name].title}, step {moment.step}, loss {moment.loss:.3f}"
                progress.update(shown, completed=before + moment.step, description=text)

            histories.append(follow(name, options, data, show))
    settings = {name: value for name, value in plain_settings(options).items() if name not in ("data", "output")}
    return Results(options=settings, versions=versions(), threads=torch.get_num_threads(), histories=histories)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        sys.exit(f"there is no family {unknown[0]}: choose from {', '.join(FAMILIES)}")
    path = options.output.with_suffix(".json")
    if options.data is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(measure(options, options.data)), indent=1) + b"\n")
    results = msgspec.json.decode(path.read_bytes(), type=Results)
    print(write_report(results.histories, options.output))


if __name__ == "__main__":
    main()
