"""Copies and synchronisations of two processes on the device `sim`, per micro-batch and per step.

    python -m tests.device.transfers [CASE ...]

prints a table for each named case of tests/pipeline/cases.py, or for a few. Steps of 4 and of 8 micro-batches tell what
belongs to a micro-batch and what to a step.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.device.sim import environment
from tests.pipeline.cases import CASES, TOKENS, VOCABULARY, config_of
from tests.pipeline.counting import open_counting_group
from tests.reference.language import SyntheticLanguage
from tests.transport.processes import results, start
from thinpipe.training.engine import Engine

SHOWN = ("llama-subspace-fp32-fp32", "llama-none-int8-int8", "aqsgd")
FEW, MANY = 4, 8
"""Micro-batches of a step."""


def measure(*names: str) -> list[dict[str, dict[str, list[int]]]]:
    """For each process and case: counts of one micro-batch and of a step without its micro-batches, by their names."""
    return results(start(2, "tests.device.transfers", "worker", *names, env=os.environ | environment()))


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        print(json.dumps(_counted(sys.argv[2:])))
        return
    names = sys.argv[1:] or list(SHOWN)
    processes = measure(*names)
    for name in names:
        rows = [process[name] for process in processes]
        print(f"\n{name}: per micro-batch + per step\n\n| | first stage | last stage |\n|---|---|---|")
        for counter in sorted(set().union(*rows)):
            cells = [row.get(counter, (0, 0)) for row in rows]
            print(f"| {counter} | {' | '.join(f'{each} + {rest}' for each, rest in cells)} |")


def _counted(names: list[str]) -> dict[str, dict[str, list[int]]]:
    torch.set_num_threads(1)
    group = open_counting_group(600)
    found = {}
    for case in (case for case in CASES if case.name in names):
        config = config_of(case, 2, "1F1B")
        few, many = (_one_step(config, microbatches, group) for microbatches in (FEW, MANY))
        each = {name: (many[name] - few[name]) // (MANY - FEW) for name in many}
        found[case.name] = {name: [each[name], few[name] - FEW * each[name]] for name in sorted(many)}
    dist.barrier()
    dist.destroy_process_group()
    return found


def _one_step(config, microbatches: int, group) -> Counter[str]:
    """Counts of the third step: the first ones allocate."""
    training = replace(config.training, global_batch_size=microbatches, device="sim")
    config = replace(config, training=training)
    engine, language = Engine(config, config.model.resolve(VOCABULARY), group), SyntheticLanguage(VOCABULARY, seed=1)
    for step in range(3):
        torch.sim.reset_counts()
        engine.step(step, language.batch(step, microbatches, TOKENS).numpy(), lr=3e-3)
    return torch.sim.counts()


if __name__ == "__main__":
    main()
