"""Where does the basis go? Many Grassmann updates of a small subspace model: does U settle, wander or turn back?

    thinpipe tokenize --sources BOOKS... --output TOKENS --vocab-size 4096
    python -m benchmarks.basis --data TOKENS --output benchmarks/results/basis
    python -m benchmarks.basis --records benchmarks/results/convergence/records/*.json --output benchmarks/results/basis
    python -m benchmarks.basis --output benchmarks/results/basis    (draws what OUTPUT.json holds again)

The first form trains a small Llama with each of the step sizes and follows U itself; under five minutes on one core.
The second reads what finished runs kept of their changes: records of the convergence study, or folders of runs. Both
can be asked for at once, for six runs in all. Writes OUTPUT.json, OUTPUT.png and OUTPUT.md.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from benchmarks.basis_movement import Change, distances, random_distance, read_changes, spectrum, summary
from benchmarks.basis_report import write_report
from benchmarks.provenance import plain_settings, versions
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
    DataConfig,
    DebugConfig,
    JobConfig,
    LRSchedulerConfig,
    ModelSettings,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from thinpipe.core.errors import UserError
from thinpipe.data import Cursor
from thinpipe.optim.lr_schedule import lr_factor
from thinpipe.report.figures import COLOURS
from thinpipe.subspace import Subspace
from thinpipe.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Options:
    output: Path
    """Where the figure and the JSON go, without an ending."""
    data: Path | None = None
    """Folder made by `thinpipe tokenize`: a model is trained on it."""
    records: tuple[Path, ...] = ()
    """Finished runs to read: files of the convergence study, or folders of runs."""
    step_sizes: tuple[float, ...] = (0.1, 1.0, 10.0)
    """Of the step on the manifold; one training each."""
    updates: int = 100
    """Changes of basis in each training."""
    interval: int = 10
    """Optimiser steps between two changes."""
    dim: int = 128
    width: int = 8
    """K, the columns of U."""
    batch_size: int = 8
    seq_len: int = 64
    lr: float = 3e-3
    """Constant after the warm-up, so that only the basis can settle."""
    seed: int = 0

    def config(self, step_size: float) -> RunConfig:
        return RunConfig(
            job=JobConfig(dump_folder=self.output),
            model=ModelSettings(
                preset="llama-tiny",
                dim=self.dim,
                max_seq_len=self.seq_len,
                boundaries=(1, 2, 3),
                subspace=SubspaceConfig(width=self.width),
            ),
            data=DataConfig(path=self.data or Path()),
            training=TrainingConfig(
                steps=self.updates * self.interval, global_batch_size=self.batch_size, seq_len=self.seq_len
            ),
            optimizer=OptimizerConfig(lr=self.lr),
            lr_scheduler=LRSchedulerConfig(warmup_steps=self.interval, decay_type="linear", min_lr_factor=1.0),
            basis=BasisConfig(interval=self.interval, step_size=step_size),
            debug=DebugConfig(seed=self.seed),
        )


class Energy:
    """S = Σ GᵀG whole, which the tracker never forms: how much any K directions could have captured."""

    def __init__(self, dim: int) -> None:
        self.s_DD = torch.zeros(dim, dim, dtype=torch.float64)

    @torch.no_grad()
    def observe(self, gradient_BTD: Tensor) -> None:
        gradient_ND = gradient_BTD.flatten(0, -2).double()
        self.s_DD += gradient_ND.T @ gradient_ND

    def best(self, width: int) -> float:
        """The largest captured energy of all subspaces of this width; begins anew."""
        values_D = torch.linalg.eigvalsh(self.s_DD)
        self.s_DD.zero_()
        return float(values_D[-width:].sum() / values_D.sum())


def follow(options: Options, step_size: float) -> Iterator[Change]:
    """Trains, and tells of every change of basis when it happens."""
    config = options.config(step_size)
    trainer = Trainer(config)
    engine, batch_loader, cursor = trainer.engine, trainer.batch_loader, Cursor()
    space, tracker, energy = engine.model.space, engine.tracker, Energy(options.dim)
    assert isinstance(space, Subspace)
    assert tracker is not None

    def observe(gradient_BTD: Tensor) -> None:
        tracker.observe(gradient_BTD)
        energy.observe(gradient_BTD)

    engine.model.segments[-1].on_gradient = observe
    bases = [space.basis]
    for step in range(config.training.steps):
        lr = options.lr * lr_factor(step, config.training.steps, config.lr_scheduler)
        outcome = engine.step(step, batch_loader.batch(cursor), lr)
        cursor = batch_loader.next_cursor(cursor)
        if engine.basis_is_due(step + 1):
            best = energy.best(options.width)
            update = engine.update_basis(batch_loader.batch(cursor))
            bases.append(space.basis)
            yield {
                "step": step + 1,
                "loss": outcome.loss,
                "best_energy": best,
                **vars(update),
                **spectrum(space.basis),
                **distances(bases),
            }


def follow_all(options: Options) -> dict[str, list[Change]]:
    """By step size, with a line about every tenth update."""
    series: dict[str, list[Change]] = {}
    began, total = time.monotonic(), len(options.step_sizes) * options.updates
    for number, size in enumerate(options.step_sizes):
        changes = series.setdefault(f"step size {size:g}", [])
        for change in follow(options, size):
            changes.append(change)
            if len(changes) % 10 == 0:
                done = number * options.updates + len(changes)
                left = (time.monotonic() - began) / done * (total - done)
                print(
                    f"step size {size:g}: update {len(changes)}/{options.updates}, loss {change['loss']:.3f}, "
                    f"captured {change['captured_energy']:.2f}, {left / 60:.1f} min left",
                    file=sys.stderr,
                    flush=True,
                )
    return series


def measure(options: Options) -> dict[str, Any]:
    began, random = time.monotonic(), random_distance(options.dim, options.width)
    read = {path.name.removesuffix(".json"): changes for path in options.records if (changes := read_changes(path))}
    runs = len(read) + (len(options.step_sizes) if options.data is not None else 0)
    if runs > len(COLOURS):
        raise UserError(f"{runs} runs are too many for one picture: name at most {len(COLOURS)}")
    followed = follow_all(options) if options.data is not None else {}
    summaries = {name: summary(changes, random) for name, changes in followed.items()}
    summaries |= {name: summary(changes, None) for name, changes in read.items()}
    return {
        "options": {
            name: value for name, value in plain_settings(options).items() if name not in ("data", "output", "records")
        },
        "versions": versions(),
        "seconds": round(time.monotonic() - began, 1),
        "summaries": summaries,
        "changes": {**followed, **read},
    }


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    kept = options.output.with_suffix(".json")
    if options.data is not None or options.records:
        try:
            result = measure(options)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        kept.write_text(json.dumps(result) + "\n")
    elif not kept.is_file():
        print("pass --data FOLDER to train, or --records FILE to read", file=sys.stderr)
        return 2
    result = json.loads(kept.read_text())
    print(write_report(result, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
