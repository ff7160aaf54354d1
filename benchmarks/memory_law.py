"""Memory that the cost model foretells, against the allocator: python -m benchmarks.memory_law --output DIR.

Two steps of whole models for every precision recipe, with and without offload, for each kind of activation
checkpointing, dense and with a keel, at four sizes: on the CPU the highest resident set with glibc's allocator, on the
second device of the tests (`sim`) what its allocator gave out. Readings are kept in memory_law.json, and a command that
was interrupted goes on there. With --huggingface runs on Hugging Face models instead (`memory_law_huggingface.py`).
Linux only.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import memory_law_huggingface
from benchmarks.provenance import versions
from tests.train.step_memory import VOCABULARY, read_peaks, run_config
from thinpipe.config.run import RunConfig
from thinpipe.core.files import write_atomically
from thinpipe.planning.fitting import memory_of_processes
from thinpipe.planning.memory_budget import MemoryBudget

DEVICES = ("cpu", "sim")
RECIPES = ("fp32", "bf16-mixed", "bf16")
OFFLOADS = ("none", "optimizer")
CHECKPOINTING = ("none", "block", "segment")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "keel": {
        "projection": {"width": 32, "token_prior_rank": 64, "token_prior_window": 4, "embedding_rank": 64},
        "boundaries": [1, 3],
    },
}
SIZES: dict[str, dict[str, int]] = {
    "activations": {"dim": 128, "layers": 4, "batch": 2, "micro": 1, "seq": 512},
    "weights": {"dim": 512, "layers": 4, "batch": 2, "micro": 1, "seq": 64},
    "both": {"dim": 256, "layers": 6, "batch": 4, "micro": 2, "seq": 192},
    "tables": {"dim": 256, "layers": 4, "batch": 2, "micro": 1, "seq": 64, "vocabulary": 65_536},
}
NAME = "memory_law"
CASES_AT_A_TIME = 18
LIMIT = 0.10
"""Largest error that the cost model should have."""


@dataclass(frozen=True, order=True)
class Case:
    device: str
    model: str
    recipe: str
    offload: str
    checkpointing: str
    size: str

    @property
    def key(self) -> str:
        return " ".join((self.device, self.model, self.recipe, self.offload, self.checkpointing, self.size))

    @property
    def sections(self) -> dict[str, Any]:
        size = SIZES[self.size]
        dim = size["dim"]
        return {
            "vocabulary": self.vocabulary,
            "model": {
                "preset": "llama-tiny",
                "dim": dim,
                "n_layers": size["layers"],
                "n_heads": dim // 64,
                "n_kv_heads": dim // 128,
                "hidden_dim": 8 * dim // 3 // 32 * 32,
                "max_seq_len": 1024,
                **MODELS[self.model],
            },
            "training": {
                "global_batch_size": size["batch"],
                "seq_len": size["seq"],
                "device": self.device,
                "precision": self.recipe,
                "offload": self.offload,
            },
            "parallelism": {"pipeline_parallel_microbatch_size": size["micro"]},
            "execution": {"checkpoint_activations": self.checkpointing},
        }

    @property
    def vocabulary(self) -> int:
        return SIZES[self.size].get("vocabulary", VOCABULARY)

    @property
    def predicted_nbytes(self) -> int:
        sections = self.sections
        del sections["vocabulary"]
        config: RunConfig = run_config(sections)
        host = None if self.device == "cpu" else 0
        budget = MemoryBudget(place=self.device, free_nbytes=0, host_free_nbytes=host)
        [use] = memory_of_processes(config, config.model.resolve(self.vocabulary), budget)
        return use.total


def all_cases() -> Iterator[Case]:
    """Without offload on the CPU, which has nowhere to put anything."""
    for facts in product(DEVICES, MODELS, RECIPES, OFFLOADS, CHECKPOINTING, SIZES):
        case = Case(*facts)
        if case.device != "cpu" or case.offload == "none":
            yield case


def measure(cases: list[Case]) -> dict[str, int]:
    """Peak bytes by the key of each case; one process for some cases of a device."""
    found: dict[str, int] = {}
    for device in DEVICES:
        here = [case for case in cases if case.device == device]
        for start in range(0, len(here), CASES_AT_A_TIME):
            some = here[start : start + CASES_AT_A_TIME]
            peaks = read_peaks([case.sections for case in some], on_sim=device == "sim")
            found |= {case.key: peak for case, peak in zip(some, peaks, strict=True)}
    return found


def error(case: Case, peak_nbytes: int) -> float:
    """Foretold bytes divided by measured ones, less 1."""
    return case.predicted_nbytes / peak_nbytes - 1


def batches(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases that are measured together."""
    left = sorted(cases, key=lambda case: (case.size, case.device))
    yield from (left[start : start + CASES_AT_A_TIME] for start in range(0, len(left), CASES_AT_A_TIME))


def write_page(peaks: dict[str, int], limit: float = LIMIT) -> str:
    cases = [case for case in all_cases() if case.key in peaks]
    errors = {case: error(case, peaks[case.key]) for case in cases}
    worst = max(errors, key=lambda case: abs(errors[case]))
    above = sorted((case for case in cases if abs(errors[case]) > limit), key=lambda case: -abs(errors[case]))
    lines = [
        "# The memory law against the allocator",
        "",
        "`python -m benchmarks.memory_law --output benchmarks/results --date DATE`: two steps of whole models,",
        "foretold bytes over measured ones. CPU: highest resident set with glibc, freed blocks returned at once.",
        "`sim`: the second device of the tests, allocated bytes. "
        f"{', '.join(f'{name} {value}' for name, value in versions().items())}.",
        "",
        "Sizes: "
        + "; ".join(
            f"*{name}* D = {size['dim']}, {size['layers']} blocks, {size['batch']} x {size['seq']} tokens in "
            f"micro-batches of {size['micro']}"
            for name, size in SIZES.items()
        )
        + f"; vocabulary {VOCABULARY}, of *tables* {SIZES['tables']['vocabulary']}.",
        "",
        f"Measured: {len(cases)} of {len([*all_cases()])} cases. "
        f"Worst of {len(cases)}: {errors[worst]:+.1%} ({worst.key}). Above {limit:.0%}: {len(above)}.",
        *(f"- {errors[case]:+.1%}: {case.key}" for case in above),
        "",
        f"| device | model | recipe | offload | checkpointing | {' | '.join(f'{size}, MB' for size in SIZES)} | "
        f"{' | '.join(f'{size}, error' for size in SIZES)} |",
        f"|{'---|' * (5 + 2 * len(SIZES))}",
    ]
    for facts in product(DEVICES, MODELS, RECIPES, OFFLOADS, CHECKPOINTING):
        row = [Case(*facts, size) for size in SIZES]
        if any(case in errors for case in row):
            measured = [f"{peaks[case.key] / 1e6:.0f}" if case in errors else "" for case in row]
            wrong = [f"{errors[case]:+.1%}" if case in errors else "" for case in row]
            lines.append(f"| {' | '.join((*facts, *measured, *wrong))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for memory_law.json and the page")
    parser.add_argument("--date", required=True, help="for the names of both files, as 2026-11-18")
    parser.add_argument("--huggingface", action="store_true", help="measure runs on Hugging Face models")
    options = parser.parse_args()
    law: Any = memory_law_huggingface if options.huggingface else sys.modules[__name__]
    options.output.mkdir(parents=True, exist_ok=True)
    readings = options.output / f"{law.NAME}_{options.date}.json"
    peaks: dict[str, Any] = json.loads(readings.read_text()) if readings.exists() else {}
    for some in law.batches([case for case in law.all_cases() if case.key not in peaks]):
        peaks |= law.measure(some)
        write_atomically(readings, json.dumps(peaks, indent=1).encode())
        print(f"{len(peaks)} of {len([*law.all_cases()])}", flush=True)
    write_atomically(options.output / f"{law.NAME}_{options.date}.md", law.write_page(peaks, LIMIT).encode())


if __name__ == "__main__":
    main()
