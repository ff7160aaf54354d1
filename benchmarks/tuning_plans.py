"""What tuning four published models takes at home, by `thinpipe plan`: the table of docs/concepts/plan.md.
python -m benchmarks.tuning_plans rewrites it there.

From config.json alone; nothing of these models was downloaded or run. Needs the extra `tune`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from thinpipe.api.planning import model_to_plan
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.model import ExecutionConfig
from thinpipe.config.run import ModelSettings, ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.core.files import write_atomically
from thinpipe.core.units import format_duration_ceil
from thinpipe.planning.alternatives import Alternative, Alternatives, find_alternatives
from thinpipe.planning.machines import Machines, load_machines
from thinpipe.planning.planner import Plan, estimate_cost, make_plan

ROOT = Path(__file__).parents[1]
PAGE, PUBLISHED = ROOT / "docs/concepts/plan.md", ROOT / "tests/plan/published"
HOMES = Path(__file__).parent / "tuning_homes.toml"
BEGIN, END = "<!-- tables: python -m benchmarks.tuning_plans writes them -->", "<!-- end of tables -->"
MODELS = {"Qwen3-0.6B": 2, "Llama-3.1-8B": 4, "Qwen3-32B": 8, "Llama-3.1-70B": 16}
"""Name -> number of homes."""
LORA = LoraConfig(r=16)
TOKENS, BATCH, CHATS = 512, 64, 10_000


@dataclass(frozen=True, kw_only=True)
class Way:
    lora: LoraConfig | None = None
    quantize_base: str | None = None


WAYS = {"LoRA": Way(lora=LORA), "LoRA on nf4": Way(lora=LORA, quantize_base="nf4"), "in full": Way()}


def settings(name: str, way: Way, boundary: BoundaryConfig, homes: int) -> RunConfig:
    source = PUBLISHED / name
    layers = _layers(source)
    boundaries = tuple(index * layers // homes for index in range(1, homes))
    model = ModelSettings(hf=str(source), boundaries=boundaries, quantize_base=way.quantize_base)  # type: ignore[arg-type]
    return RunConfig(
        model=model,
        lora=way.lora,
        training=TrainingConfig(
            steps=CHATS // BATCH, global_batch_size=BATCH, seq_len=TOKENS, precision="bf16", offload="optimizer"
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=homes,
            pipeline_parallel_microbatch_size=1,
            pipeline_parallel_extra_microbatches=2 if homes > 1 else 0,
        ),
        execution=ExecutionConfig(checkpoint_activations="block"),
        boundary=boundary,
    )


@cache
def _layers(source: Path) -> int:
    config = RunConfig(model=ModelSettings(hf=str(source)))
    return model_to_plan(config, None)[0].n_layers


@cache
def plan_of(name: str, way: str, preset: str = "tuning") -> tuple[Plan, Alternatives]:
    homes = MODELS[name]
    config = settings(name, WAYS[way], BoundaryConfig(preset=preset), homes)  # type: ignore[arg-type]
    known = load_machines(HOMES)
    [home] = known.machines
    machines: Machines = replace(
        known, machines=tuple(replace(home, name=f"home-{number}") for number in range(1, homes + 1))
    )
    plan = make_plan(config, model_to_plan(config, None)[0], machines)
    return plan, find_alternatives(plan, estimate_cost(plan, CHATS * TOKENS))


def tables() -> str:
    return "\n\n".join("\n".join(lines) for lines in (_plans(), _files()))


def _plans() -> Iterator[str]:
    yield (
        "| model | tuned | homes | fullest card, of 12 GB | in its host | tokens/s, 8 bit | 4 bit | "
        "10,000 chats, 8 bit | one of the homes alone | one rented card |"
    )
    yield f"|{'---|' * 10}"
    for name, way in product(MODELS, WAYS):
        plan, others = plan_of(name, way)
        thin, _ = plan_of(name, way, "tuning-thin")
        fullest = max(plan.machine_loads, key=lambda load: load.memory.total).memory
        speeds = ((f"{each.tokens_per_second:,.0f}" if each.fits else "does not fit") for each in (plan, thin))
        hours = _time(estimate_cost(plan, CHATS * TOKENS).hours) if plan.fits else ""
        yield (
            f"| {name} | {way} | {MODELS[name]} | {fullest.total / 1e9:.1f} GB | {fullest.host / 1e9:.1f} GB | "
            f"{' | '.join(speeds)} | {hours} | {_own(others)} | {_alternative(others.rented)} |"
        )


def _own(others: Alternatives) -> str:
    if others.streaming is not None:
        return f"{_time(others.streaming.cost.hours)}, model in host memory"
    return _alternative(others.one_machine)


def _alternative(each: Alternative | None) -> str:
    if each is None:
        return "does not fit"
    paid = f", {each.machine.name}, {each.cost.money:,.2f} {each.currency}" if each.rented else ""
    return f"{_time(each.cost.hours)}{paid}"


def _time(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.0f} min"
    return f"{hours:.1f} h" if hours < 72 else f"{hours / 24:.1f} days"


def _files() -> Iterator[str]:
    yield (
        "| model | tuned | trained weights | bytes a token at a boundary: bf16, 8 bit, 4 bit | "
        "largest first download | a checkpoint, all homes | the slowest sends it in |"
    )
    yield f"|{'---|' * 7}"
    for name, way in product(MODELS, ("LoRA", "in full")):
        plan, _ = plan_of(name, way)
        whole = replace(plan.config, boundary=BoundaryConfig(forward="bf16", backward="bf16"))
        plans = (make_plan(whole, plan.model, plan.machines), plan, plan_of(name, way, "tuning-thin")[0])
        carried = ", ".join(f"{each.nbytes_per_token:,.0f}" for each in plans)
        loads = plan.machine_loads
        first = max(loads, key=lambda load: load.download_nbytes)
        fetched = 8 * first.download_nbytes / first.machine.down_bps
        saved = max(8 * load.commit_nbytes / load.machine.up_bps for load in loads)
        yield (
            f"| {name} | {way} | {sum(load.parameters for load in loads) / 1e6:,.0f} M | {carried} | "
            f"{first.download_nbytes / 1e9:.2f} GB, {format_duration_ceil(fetched)} | "
            f"{sum(load.commit_nbytes for load in loads) / 1e9:,.2f} GB | {format_duration_ceil(saved)} |"
        )


def with_tables(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    write_atomically(PAGE, with_tables(PAGE.read_text("utf-8")).encode())
