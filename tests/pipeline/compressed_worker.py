"""A pipeline of somebody else's modules with every schedule and boundary: one process of it, and its twin for the test.

An audit hook counts unpickled classes: nothing that comes from a neighbour may be.
"""

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
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
    "DualPipeV": (ScheduleDualPipeV, [[0, 3], [1, 2]]),
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
        name: hashlib.sha256(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in module.named_parameters()
    }


def run_twin(boundary, count, *, dtype=torch.float32):
    """Losses of all steps, then weights of every stage, then the outputs in validation."""
    stages = [stage.to(dtype) for stage in make_stages(count)]
    twin = CompressedSequential(stages, shape=SHAPE, boundary=boundary, dtype=dtype, seed=5)
    optimizer, losses = torch.optim.SGD(twin.parameters(), lr=0.1), []
    for step in range(STEPS):
        inputs, target = (part.to(dtype) for part in batch(step))
        found = twin.step(inputs, target=target, loss_fn=nn.functional.mse_loss, n_microbatches=MICROBATCHES)
        losses.append([loss.item() for loss in found])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            outputs = [twin(chunk) for chunk in inputs.chunk(MICROBATCHES)]
    weights = {str(index): digest(stage) for index, stage in enumerate(twin.stages)}
    lengths = [twin.forward_nbytes, twin.backward_nbytes]
    return {"losses": losses, "weights": weights, "outputs": torch.cat(outputs).tolist(), "nbytes": lengths}


class Pipeline:
    """The stages of this process and their optimiser."""

    def __init__(self, schedule_name, boundary, group, dtype=torch.float32, device="cpu"):
        self.kind, places = SCHEDULES[schedule_name]
        indices, count = places[group.rank()], sum(map(len, places))
        self.first, self.last, self.how = 0 in indices, count - 1 in indices, {"dtype": dtype, "device": device}
        modules = enumerate(make_stages(count))
        self.modules = {index: module.to(**self.how) for index, module in modules if index in indices}
        how = {"shape": SHAPE, "boundary": boundary, "dtype": dtype, "seed": 5, "group": group}
        self.stages = [CompressedStage(module, index, count, device, **how) for index, module in self.modules.items()]
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)

    def schedule(self, microbatches=MICROBATCHES, kind=None):
        stages = self.stages if len(self.stages) > 1 else self.stages[0]
        return (kind or self.kind)(stages, microbatches, loss_fn=nn.functional.mse_loss)

    def step(self, schedule, step):
        """The loss of every micro-batch, in the process with the last stage."""
        (inputs, target), losses = (part.to(**self.how) for part in batch(step)), []
        wanted = {"target": target, "losses": losses} if self.last else {}
        schedule.step(*([inputs] if self.first else []), **wanted)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() for loss in losses]

    @torch.no_grad()
    def outputs(self, schedule, step, samples=None):
        """In validation, of so many samples."""
        inputs, target = (part.to(**self.how)[:samples] for part in batch(step))
        found = schedule.eval(*([inputs] if self.first else []), **({"target": target} if self.last else {}))
        return found.tolist() if self.last else None

    def weights(self):
        return {str(index): digest(module) for index, module in self.modules.items()}


def run_here(schedule_name, boundary, group, **how):
    """What `run_twin` comes to with the stages of this process, validation after every step included."""
    pipeline = Pipeline(schedule_name, boundary, group, **how)
    schedule, losses = pipeline.schedule(), []
    for step in range(STEPS):
        losses.append(pipeline.step(schedule, step))
        outputs = pipeline.outputs(schedule, step)
    result = {
        "weights": pipeline.weights(),
        "nbytes": [pipeline.stages[0].forward_nbytes, pipeline.stages[0].backward_nbytes],
    }
    return result | ({"losses": losses, "outputs": outputs} if pipeline.last else {})


def run_detailed(group):
    """As with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return run_here("1F1B", "int4", group)
    finally:
        dist.set_debug_level(level)


def run_two_schedules(group):
    """Training with 4 micro-batches, validation with 2 and with 4, each by a schedule of its own and by turns."""
    pipeline = Pipeline("1F1B", "int4", group)
    training, fewer, more = (
        pipeline.schedule(),
        pipeline.schedule(MICROBATCHES // 2, ScheduleGPipe),
        pipeline.schedule(MICROBATCHES, ScheduleGPipe),
    )
    losses, outputs = [], []
    for step in range(STEPS):
        losses.append(pipeline.step(training, step))
        outputs += [pipeline.outputs(fewer, step, SHAPE[0] * MICROBATCHES // 2), pipeline.outputs(more, step)]
        outputs += [pipeline.outputs(training, step)]
    return {"losses": losses, "outputs": outputs}


def run_resumed(group):
    """Half of the steps, saved, and the others with new stages that load it; the codec state at both moments."""
    pipeline, states, losses = Pipeline("1F1B", BOUNDARIES["topk-ef21"], group), [], []
    for step in range(2 * STEPS):
        if step == STEPS:
            (saved,) = (stage.codec_state() for stage in pipeline.stages)
            before, pipeline = pipeline, Pipeline("1F1B", BOUNDARIES["topk-ef21"], group)
            for index, module in before.modules.items():
                pipeline.modules[index].load_state_dict(module.state_dict())
            pipeline.stages[0].load_codec_state(saved)
            states.append(saved)
        if step in (0, STEPS):
            schedule = pipeline.schedule()
        losses.append(pipeline.step(schedule, step))
    states.append(pipeline.stages[0].codec_state())
    listed = [{name: tensor.tolist() for name, tensor in state.items()} for state in states]
    return {"losses": losses, "states": listed, "weights": pipeline.weights()}


def run_mixed(group):
    """What is logged of a first stage that computes in bfloat16 before a second in float32, in two steps."""
    pipeline, logged = Pipeline("1F1B", "int4", group), []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("thinpipe").addHandler(handler)
    if pipeline.first:
        pipeline.modules[0].to(torch.bfloat16).register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
    schedule = pipeline.schedule()
    losses = [pipeline.step(schedule, step) for step in range(2)]
    logging.getLogger("thinpipe").removeHandler(handler)
    return {"logged": logged, "losses": losses}


def run_slow_receiver(group):
    """Most messages that were under way at once in validations whose receiver takes its time."""
    pipeline = Pipeline("GPipe", "fp32", group)
    schedule = pipeline.schedule()
    group.max_unsent = 0
    for step in range(6):
        if pipeline.last:
            time.sleep(0.1)
        pipeline.outputs(schedule, step)
    return group.max_unsent


def refusal(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


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
            results[f"{schedule} {name}"]["sent"] = sorted({nbytes for _, nbytes in group.messages})
    results["bfloat16"] = run_here("1F1B", "int4", group, dtype=torch.bfloat16)
    results["detailed"] = run_detailed(group)
    results["two schedules"] = run_two_schedules(group)
    results["mixed"] = run_mixed(group)
    results["resumed"] = run_resumed(group)
    results["slow receiver"] = run_slow_receiver(group)
    looped = Pipeline("Interleaved1F1B", "int4", group)
    results["metadata"] = refusal(lambda: looped.stages[0]._recv_meta(0))
    results["LoopedBFS"] = refusal(lambda: looped.step(looped.schedule(kind=ScheduleLoopedBFS), 0))  # the group is lost
    output.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps({"results": results, "unpickled": unpickled}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
