"""A pipeline of somebody else's modules with every schedule and boundary: one process of it, and its twin for the test.

An audit hook counts unpickled classes: nothing that comes from a neighbour may be.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from tests.pipeline.counting import open_counting_group
from thinpipe import BoundaryConfig, CompressedSequential, CompressedStage, CompressionConfig

MICROBATCHES, STEPS, SHAPE = 4, 3, (2, 6, 16)
TOPK = CompressionConfig(kind="topk", keep=0.25, feedback="ef21")
BOUNDARIES = {
    "fp32": "fp32",
    "int4": "int4",
    "topk-ef21": BoundaryConfig(states=TOPK, gradients=CompressionConfig(kind="quantise", bits=4, feedback="ef")),
    "topk-mask": BoundaryConfig(
        states=CompressionConfig(kind="topk", keep=0.25),
        gradients=CompressionConfig(kind="topk", reuse_mask=True),
        at_inference=False,
    ),
}
SCHEDULES = {
    "GPipe": (ScheduleGPipe, [[0], [1]]),
    "1F1B": (Schedule1F1B, [[0], [1]]),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, [[0, 2], [1, 3]]),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, [[0, 2], [1, 3]]),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, [[0, 3], [1, 2]]),
}
"""Each schedule with the stages of both processes."""


def make_stages(count):
    """The first takes images [B, 6, 8], the last returns one number for each."""
    torch.manual_seed(0)
    width = SHAPE[2]
    middle = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    return [
        nn.Sequential(*([nn.Linear(8, width)] if index == 0 else []), block, *last)
        for index, block in enumerate(middle)
        for last in [[nn.Linear(width, 1)] if index == count - 1 else []]
    ]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    rows = MICROBATCHES * SHAPE[0]
    return torch.randn(rows, SHAPE[1], 8, generator=generator), torch.randn(rows, SHAPE[1], 1, generator=generator)


def digest(module):
    return {
        name: hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for name, parameter in module.named_parameters()
    }


def run_twin(boundary, count):
    """Losses of all steps, then weights of every stage, then the outputs in validation."""
    twin = CompressedSequential(make_stages(count), shape=SHAPE, boundary=boundary, seed=5)
    optimizer, losses = torch.optim.SGD(twin.parameters(), lr=0.1), []
    for step in range(STEPS):
        inputs, target = batch(step)
        found = twin.step(inputs, target=target, loss_fn=nn.functional.mse_loss, n_microbatches=MICROBATCHES)
        losses.append([loss.item() for loss in found])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            outputs = [twin(chunk) for chunk in batch(step)[0].chunk(MICROBATCHES)]
    weights = {str(index): digest(stage) for index, stage in enumerate(twin.stages)}
    lengths = [twin.methods[0].states.compressor.nbytes, twin.methods[0].backward_nbytes]
    return {"losses": losses, "weights": weights, "outputs": torch.cat(outputs).tolist(), "nbytes": lengths}


def run_here(schedule_name, boundary, group):
    """The same with the stages of this process, validation after every step included."""
    kind, places = SCHEDULES[schedule_name]
    indices, count = places[group.rank()], sum(map(len, places))
    modules = {index: module for index, module in enumerate(make_stages(count)) if index in indices}
    stages = [
        CompressedStage(module, index, count, torch.device("cpu"), shape=SHAPE, boundary=boundary, seed=5, group=group)
        for index, module in modules.items()
    ]
    schedule = kind(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.1)
    first, last, all_losses, outputs = 0 in indices, count - 1 in indices, [], None
    for step in range(STEPS):
        (inputs, target), losses = batch(step), []
        given, wanted = ([inputs] if first else []), ({"target": target, "losses": losses} if last else {})
        schedule.step(*given, **wanted)
        all_losses.append([loss.item() for loss in losses])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            outputs = schedule.eval(*given, **({"target": target} if last else {}))
    weights = {str(index): digest(module) for index, module in modules.items()}
    result = {"weights": weights, "nbytes": [stages[0].forward_nbytes, stages[0].backward_nbytes]}
    return result | ({"losses": all_losses, "outputs": outputs.tolist()} if last else {})


def main():
    output, unpickled = Path(sys.argv[1]), []
    sys.addaudithook(lambda event, found: unpickled.append(str(found)) if event == "pickle.find_class" else None)
    torch.set_num_threads(1)
    group = open_counting_group(600)
    results = {}
    for schedule in SCHEDULES:
        for name, boundary in BOUNDARIES.items():
            group.messages.clear()
            results[f"{schedule} {name}"] = run_here(schedule, boundary, group)
            results[f"{schedule} {name}"]["sent"] = sorted({nbytes for tag, nbytes in group.messages if tag >= 16})
    output.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps({"results": results, "unpickled": unpickled}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
