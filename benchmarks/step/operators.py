"""The costliest operators of a training step, for when a target is missed and one has to know why."""

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.step.training_step import TrainingStep


def operator_table(step: TrainingStep, *, rows: int = 10) -> str:
    """torch.profiler's table of one step, after one step of warm-up."""
    step.run()
    on_cuda = step.device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        step.run()
        if on_cuda:
            torch.cuda.synchronize(step.device)
    order = "self_cuda_time_total" if on_cuda else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=40))
