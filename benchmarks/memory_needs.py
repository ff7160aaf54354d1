"""What models of 1, 8 and 32 billion weights need under each recipe, and how many cards hold them: the tables of
docs/concepts/memory.md, by the cost model of `thinpipe plan`. python -m benchmarks.memory_needs rewrites them there.

Nothing of these sizes has been run. No torch.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from thinpipe.config.families import PRESETS
from thinpipe.config.model import ExecutionConfig, ModelConfig
from thinpipe.config.offload import Offload
from thinpipe.config.precision import Precision
from thinpipe.config.run import ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.core.files import write_atomically
from thinpipe.planning.fitting import machines_needed, memory_of_processes
from thinpipe.planning.memory_budget import CONTEXT_NBYTES, MemoryBudget
from thinpipe.planning.segment_costs import segment_costs

PAGE = Path(__file__).parents[1] / "docs/concepts/memory.md"
BEGIN, END = "<!-- tables: python -m benchmarks.memory_needs writes them -->", "<!-- end of tables -->"
MODELS = {"llama-1b": 4, "llama-8b": 8, "llama-32b": 16}
"""Presets, with the number of equal stages for which the fullest is shown."""
RECIPES: tuple[Precision, ...] = ("fp32", "bf16-mixed", "bf16")
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer")
CARDS_GB = (8, 12, 16, 24)
HOST_GB = 32
TOKENS, BATCH = 2048, 128


def settings(precision: Precision, offload: Offload, degree: int = 1) -> RunConfig:
    return RunConfig(
        training=TrainingConfig(global_batch_size=BATCH, seq_len=TOKENS, precision=precision, offload=offload),
        parallelism=ParallelismConfig(pipeline_parallel_degree=degree, pipeline_parallel_microbatch_size=1),
        execution=ExecutionConfig(checkpoint_activations="block"),
    )


def card(memory_gb: int) -> MemoryBudget:
    """An empty card in a computer with free memory of its own."""
    free_nbytes = memory_gb * 10**9 - CONTEXT_NBYTES
    return MemoryBudget(place=f"{memory_gb} GB", free_nbytes=free_nbytes, host_free_nbytes=HOST_GB * 10**9)


def tables() -> str:
    return "\n\n".join("\n".join(lines) for lines in (_bytes_a_weight(), _needs(), _cards()))


def _bytes_a_weight() -> Iterator[str]:
    yield "| recipe | weight | gradient | moments | in all, bytes a weight | on the device with offload |"
    yield "|---|---|---|---|---|---|"
    for precision in RECIPES:
        costs = segment_costs(PRESETS["llama-8b"], settings(precision, "none"))
        count = sum(cost.parameters for cost in costs)
        parts = [
            sum(getattr(cost, kind) for cost in costs) / count
            for kind in ("weights_nbytes", "gradients_nbytes", "optimiser_nbytes")
        ]
        listed = " | ".join(f"{part:.3g}" for part in (*parts, sum(parts), sum(parts[:2])))
        yield f"| {precision} | {listed} |"


def _needs() -> Iterator[str]:
    yield (
        "| model | weights | recipe | offload | whole, GB | host, GB | state alone, GB | stages | fullest stage, GB | "
        "its host, GB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, precision, offload in product(MODELS, RECIPES, OFFLOADS):
        model, stages = replace(PRESETS[name], tied=False), MODELS[name]
        [whole] = memory_of_processes(settings(precision, offload), model, card(24))
        cut = replace(model, boundaries=_equal_cut(model, stages))
        each = memory_of_processes(settings(precision, offload, stages), cut, card(24))
        fullest = max(each, key=lambda use: use.total)
        count = sum(cost.parameters for cost in segment_costs(model, settings(precision, offload)))
        state = whole.weights + whole.gradients + whole.optimiser
        sizes = (whole.total, whole.host, state)
        yield (
            f"| {name} | {count / 1e9:.2f} B | {precision} | {offload} | {' | '.join(_gb(size) for size in sizes)} | "
            f"{stages} | {_gb(fullest.total)} | {_gb(fullest.host)} |"
        )


def _cards() -> Iterator[str]:
    yield f"| model | recipe | offload | {' | '.join(f'cards of {size} GB' for size in CARDS_GB)} |"
    yield f"|{'---|' * (3 + len(CARDS_GB))}"
    for name, precision, offload in product(MODELS, RECIPES, OFFLOADS):
        numbers = [_number_of_cards(PRESETS[name], settings(precision, offload), card(size)) for size in CARDS_GB]
        yield f"| {name} | {precision} | {offload} | {' | '.join(numbers)} |"


def _number_of_cards(model: ModelConfig, config: RunConfig, budget: MemoryBudget) -> str:
    [whole] = memory_of_processes(config, model, budget)
    if whole.total <= budget.usable_nbytes and whole.host <= (budget.host_free_nbytes or 0):
        return "1"
    found = machines_needed(config, model, budget)
    return "none" if found is None else str(found[0])


def _equal_cut(model: ModelConfig, stages: int) -> tuple[int, ...]:
    return tuple(index * model.n_layers // stages for index in range(1, stages))


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f}"


def with_tables(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    write_atomically(PAGE, with_tables(PAGE.read_text("utf-8")).encode())
