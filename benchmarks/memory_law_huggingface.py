"""Cases of `python -m benchmarks.memory_law --huggingface`: runs on small Qwen 3 models with random weights, in one
process or two, with vocabularies of 4,096 and 131,072, tuned with adapters, with adapters on a quantised base, and in
full. Of two processes the fullest counts.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.provenance import versions
from tests.huggingface.step_memory import base_config, make_base, read_peaks
from tests.train.step_memory import run_config
from thinpipe.models.hf.base_shapes import base_shapes
from thinpipe.planning.fitting import memory_of_processes
from thinpipe.planning.machine_loads import MemoryUse
from thinpipe.planning.memory_budget import MemoryBudget
from thinpipe.planning.stored_model import StoredModel, cut

NAME = "memory_law_huggingface"
LAYERS, BATCH = 4, 2
SIZES = {
    "4k": {"vocabulary": 4096, "width": 256, "seq": 512},
    "128k": {"vocabulary": 131_072, "width": 128, "seq": 320},
}
"""With the large vocabulary 42 million logits in a micro-batch, more than may exist at once."""
WAYS = {
    "4k": (
        "LoRA fp32",
        "LoRA bf16-mixed",
        "LoRA bf16",
        "nf4 bf16",
        "int8 bf16",
        "full fp32",
        "full bf16-mixed",
        "full bf16",
    ),
    "128k": ("LoRA fp32", "LoRA bf16", "nf4 bf16", "full fp32", "full bf16"),
}
QUANTISED = ("nf4", "int8")
PLACES = (("cpu", 1), ("cpu", 2), ("sim", 1))


@dataclass(frozen=True, order=True)
class Case:
    device: str
    processes: int
    size: str
    way: str
    recipe: str
    checkpointing: str

    @property
    def key(self) -> str:
        return " ".join(map(str, (self.device, self.processes, self.size, self.way, self.recipe, self.checkpointing)))

    def sections(self, base: Path) -> dict[str, Any]:
        size = SIZES[self.size]
        model: dict[str, Any] = {"hf": str(base), "boundaries": [LAYERS // 2]}
        if self.way in QUANTISED:
            model["quantize_base"] = self.way
        return {
            "model": model,
            "training": {
                "global_batch_size": BATCH,
                "seq_len": size["seq"],
                "device": self.device,
                "precision": self.recipe,
            },
            "parallelism": {"pipeline_parallel_microbatch_size": 1, "pipeline_parallel_degree": self.processes},
            "execution": {"checkpoint_activations": self.checkpointing},
            **({} if self.way == "full" else {"lora": {"r": 16}}),
        }

    def predicted(self) -> MemoryUse:
        """Of the fullest process."""
        config = run_config(self.sections(Path("base")))
        model = cut(_shapes(self.size), config)
        budget = MemoryBudget(place=self.device, free_nbytes=0, host_free_nbytes=None if self.device == "cpu" else 0)
        return max(memory_of_processes(config, model, budget), key=lambda use: use.total)


def _sizes(size: str) -> dict[str, int]:
    given = SIZES[size]
    return {"width": given["width"], "layers": LAYERS, "vocabulary": given["vocabulary"]}


@cache
def _shapes(size: str) -> StoredModel:
    stored = base_config(**_sizes(size))
    return StoredModel.of_shapes(base_shapes(stored), stored)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()  # kept until this process ends


@cache
def _base(size: str) -> Path:
    base: Path = make_base(Path(_folder().name) / size, **_sizes(size))
    return base


def all_cases() -> Iterator[Case]:
    """bitsandbytes knows no device `sim`; blocks are checkpointed where that is cheap to measure."""
    for (device, processes), size in product(PLACES, SIZES):
        for way, checkpointing in product(WAYS[size], ("none", "block")):
            kind, _, recipe = way.partition(" ")
            case = Case(device, processes, size, kind, recipe, checkpointing)
            if (device == "cpu" or kind not in QUANTISED) and (
                checkpointing == "none" or (size == "4k" and processes == 1)
            ):
                yield case


def measure(cases: list[Case]) -> dict[str, Any]:
    """Bytes while loading and of the steps, of each process, by the key of each case. All of one place and size."""
    sections, place = [case.sections(_base(case.size)) for case in cases], cases[0]
    peaks = read_peaks(sections, processes=place.processes, on_sim=place.device == "sim")
    return {case.key: [*each] for case, each in zip(cases, peaks, strict=True)}


def batches(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases that are measured together: those of a place and a size."""
    group = attrgetter("device", "processes", "size")
    yield from ([*some] for _, some in groupby(sorted(cases, key=group), key=group))


def write_page(peaks: dict[str, Any], limit: float) -> str:
    cases = [case for case in all_cases() if case.key in peaks]
    uses = {case: case.predicted() for case in cases}
    measured = {case: max(steps for _, steps in peaks[case.key]) for case in cases}
    errors = {case: uses[case].total / measured[case] - 1 for case in cases}
    worst = max(errors, key=lambda case: abs(errors[case]))
    above = [case for case in cases if abs(errors[case]) > limit]
    middle = sorted(abs(error) for error in errors.values())[len(errors) // 2]
    lines = [
        "# The memory law against the allocator: Hugging Face models",
        "",
        "`python -m benchmarks.memory_law --huggingface --output benchmarks/results --date DATE`: two steps on Qwen 3",
        "models with random weights in bfloat16, foretold bytes of the fullest process over measured ones. CPU:",
        "highest resident set with glibc, freed blocks returned at once. `sim`: the second device of the tests,",
        f"allocated bytes. {', '.join(f'{name} {value}' for name, value in versions().items())}.",
        "",
        "Sizes: "
        + "; ".join(
            f"*{name}* vocabulary {size['vocabulary']:,}, width {size['width']}, {LAYERS} blocks, "
            f"{BATCH} x {size['seq']} tokens in micro-batches of 1"
            for name, size in SIZES.items()
        )
        + ". Adapters of rank 16 on all matrices.",
        "",
        f"Measured: {len(cases)} of {len([*all_cases()])} cases. Error in the middle {middle:.1%}, worst "
        f"{errors[worst]:+.1%} ({worst.key}). Above {limit:.0%}: {len(above)}, of them "
        f"{sum(errors[case] > 0 for case in above)} foretold too much.",
        "",
        "| device | processes | size | tuned | recipe | checkpointing | while loading, MB | steps, MB | foretold, MB | "
        "error | of it frozen | activations |",
        f"|{'---|' * 12}",
    ]
    for case in cases:
        loading = max(before for before, _ in peaks[case.key])
        facts = (case.device, case.processes, case.size, case.way, case.recipe, case.checkpointing)
        sizes = (f"{nbytes / 1e6:.0f}" for nbytes in (loading, measured[case], uses[case].total))
        parts = (f"{nbytes / 1e6:.0f}" for nbytes in (uses[case].frozen, uses[case].activations))
        lines.append(f"| {' | '.join(map(str, (*facts, *sizes, f'{errors[case]:+.1%}', *parts)))} |")
    return "\n".join(lines) + "\n"
