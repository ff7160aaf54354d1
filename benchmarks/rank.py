"""Does the rank of what a transformer writes collapse while it learns? Stable rank of every writer over training.

    thinpipe tokenize --sources BOOKS... --output tokens --vocab-size 4096
    python -m benchmarks.rank --data tokens --output benchmarks/results/rank

Trains a small dense Llama and records ‖W‖²_F / ‖W‖²_2 of every matrix that writes to the residual stream: D for an
orthogonal matrix, about 0.3 D for a random square one, 1 for a single direction. Writes OUTPUT.png, OUTPUT.json and
prints one JSON line.
"""

import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from thinpipe.data import Batches, Cursor, Tokens
from thinpipe.models import LlamaConfig, Model, build, materialise
from thinpipe.subspace import RowwiseAdamW, Writer


@dataclass(frozen=True, kw_only=True)
class Options:
    data: Path
    """Folder made by `thinpipe tokenize`."""
    output: Path
    """Where the figure and the JSON go, without an ending."""
    dim: int = 192
    layers: int = 6
    steps: int = 1000
    batch_size: int = 16
    seq_len: int = 128
    lr: float = 2e-3
    measure_every: int = 25
    seed: int = 0


def stable_rank(matrix: torch.Tensor) -> float:
    """‖W‖²_F / ‖W‖²_2, between 1 and min(shape); unlike the rank it does not change when noise is added."""
    values = torch.linalg.svdvals(matrix.detach().double())
    return float(values.square().sum() / values[0].square())


def writer_ranks(model: Model) -> dict[str, float]:
    return {name: stable_rank(module.weight) for name, module in model.named_modules() if isinstance(module, Writer)}


def train(options: Options, tokens: Tokens, model: Model, console: Console) -> list[dict[str, Any]]:
    batches = Batches(tokens, seq_len=options.seq_len, batch_size=options.batch_size, seed=options.seed)
    optimizer = RowwiseAdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    cursor, records = Cursor(), []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("ETA"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=options.steps)
        for step in range(options.steps + 1):
            batch = batches.batch_at(cursor)
            cursor = batch.following
            ids = torch.from_numpy(batch.ids_BW)
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            if step % options.measure_every == 0:
                records.append({"step": step, "loss": loss.item(), "ranks": writer_ranks(model)})
                progress.update(task, completed=step, description=f"loss {loss.item():.3f}")
            warm = min(1.0, (step + 1) / 50)
            decay = 0.5 * (1 + math.cos(math.pi * step / options.steps))
            optimizer.param_groups[0]["lr"] = options.lr * warm * (0.1 + 0.9 * decay)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return records


def draw(records: list[dict[str, Any]], options: Options) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    steps = [record["step"] for record in records]
    kinds = {"attention output (o_proj)": "self_attn.o_proj", "MLP output (down_proj)": "mlp.down_proj"}
    for axes, (title, suffix) in zip(panels, kinds.items(), strict=False):
        names = [name for name in records[0]["ranks"] if name.endswith(suffix)]
        for index, name in enumerate(names):
            colour = plt.get_cmap("viridis")(index / max(1, len(names) - 1) * 0.9)
            axes.plot(steps, [record["ranks"][name] for record in records], color=colour, label=f"block {index}")
        axes.set(title=title, xlabel="step", ylabel=f"stable rank (width {options.dim})", ylim=(0, None))
        axes.legend(frameon=False, fontsize=8, ncols=2)
    panels[2].plot(steps, [record["loss"] for record in records], color="#444444")
    panels[2].set(title="training loss", xlabel="step", ylabel="nats per token")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(options.output.with_suffix(".png"), dpi=130)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    started = time.monotonic()
    tokens = Tokens(options.data / "train")
    config = LlamaConfig(
        vocab_size=tokens.manifest.vocabulary.size,
        dim=options.dim,
        n_layers=options.layers,
        n_heads=options.dim // 32,
        n_kv_heads=options.dim // 32,
        hidden_dim=-(-8 * options.dim // 3 // 32) * 32,
        max_seq_len=options.seq_len,
    )
    model = materialise(build(config), seed=options.seed)
    records = train(options, tokens, model, Console(stderr=True))
    draw(records, options)
    result = {
        "options": {name: value for name, value in asdict(options).items() if not isinstance(value, Path)},
        "tokens_sha256": tokens.manifest.content_sha256,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": options.steps * options.batch_size * options.seq_len,
        "seconds": time.monotonic() - started,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "records": records,
    }
    options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    first, last = records[0], records[-1]
    mean = {key: sum(r["ranks"].values()) / len(r["ranks"]) for key, r in (("first", first), ("last", last))}
    print(json.dumps({"mean_stable_rank": mean, "loss": {"first": first["loss"], "last": last["loss"]}}))


if __name__ == "__main__":
    main()
