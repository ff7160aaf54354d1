"""How fast the device is: sustained matrix products, training steps of each recipe, host time of a block, and which
attention kernel runs."""

import time
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thinpipe.config.parameter_shapes import attention_heads
from thinpipe.core.units import format_flops
from thinpipe.device.choice import synchronise
from thinpipe.device.memory import forget_memory_peak, memory_peak
from thinpipe.doctor.finding import Finding, ok, problem, warning
from thinpipe.planning.segment_costs import segment_costs
from thinpipe.selftest.check import REPORT_IT, Figures, RecipeName, Subject
from thinpipe.selftest.memory import LAW_IS_OFF, MEMORY_BAND, predicted_nbytes
from thinpipe.selftest.workload import LEARNING_RATE, Size, language, run_config
from thinpipe.training.engine import Engine
from thinpipe.training.matmul_speed import measure_flops
from thinpipe.training.memory_check import kernel_for

_SLICE_SECONDS, _QUICK_SLICE_SECONDS = 2.0, 0.5
_THROTTLED = 0.8
"""Part of the first rate below which a device counts as throttled."""
_STEP_SECONDS = 1.0
"""Wanted duration of a step when recipes are timed; the model is chosen by the measured rate."""
_STEP_SIZES = tuple(
    Size(dim=dim, layers=4, batch=4, microbatch=4, tokens=tokens, vocabulary=512)
    for dim, tokens in ((64, 64), (128, 128), (256, 256), (512, 512), (1024, 1024), (2048, 1024))
)
_TIMED_STEPS = 6
_LARGE_NBYTES = 1 << 30
"""Reserved bytes from which a peak shows the share that an allocator loses. Caching allocators round up by some tens of
megabytes, which is much of a small model and little of a card."""
_BLOCKS = 8
_ATTENTION_TOKENS = 512
_ATTENTION_NAMES = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_fused_attention_overrideable": "fused, of the device",
    "_scaled_dot_product_attention_math_for_mps": "math (MPS)",
}
"""torch's operators and what their kernels are called. None of them: math, from single operations."""


def check_speed(what: str, subject: Subject) -> tuple[Finding, Figures]:
    """FLOP/s of matrix products at the start and at the end of a long measurement: laptops throttle."""
    recipe, seconds = subject.recipe("auto"), subject.sustained_seconds
    piece = _QUICK_SLICE_SECONDS if subject.quick else _SLICE_SECONDS
    rates: list[float] = []
    began = time.monotonic()
    while len(rates) < 2 or time.monotonic() - began < seconds:
        rates.append(measure_flops(subject.device, tokens=16_384, dim=1024, recipe=recipe, seconds=piece))
    first, last = rates[0], rates[-1]
    subject.flops = last
    figures: Figures = {"first": first, "last": last, "seconds": round(time.monotonic() - began, 1)}
    text = f"{format_flops(first)} at first, {format_flops(last)} after {figures['seconds']} s ({recipe.name})"
    if last < _THROTTLED * first:
        fix = "Plans count on the last rate. Better cooling, or another power setting, may keep the first."
        return warning(what, f"{text}: the device slows down under load, or other programs use it", fix), figures
    return ok(what, text), figures


def check_recipe(what: str, subject: Subject, *, recipe: RecipeName) -> tuple[Finding, Figures]:
    """Steps of a model that the device computes in about `_STEP_SECONDS`: finite and falling losses, and their time."""
    subject.recipe(recipe)
    size = _size(subject)
    config = run_config(size, subject.device, recipe)
    model = config.model.resolve(size.vocabulary)
    before = forget_memory_peak(subject.device)
    engine, losses = Engine(config, model), []
    ids = language(0, size.batch, size.tokens, size.vocabulary)
    fastest = float("inf")
    for step in range(_TIMED_STEPS):
        started = time.perf_counter()
        outcome = engine.step(step, ids, LEARNING_RATE / 3)
        synchronise(subject.device)
        fastest = min(fastest, time.perf_counter() - started)
        if outcome.fault is not None:
            return problem(what, f"step {step + 1} is not finite: {outcome.fault}", REPORT_IT), {}
        losses.append(outcome.loss)
    flops = sum(cost.flops_per_token for cost in segment_costs(model, config)) * size.batch * size.tokens / fastest
    subject.calibrate(flops={**subject.calibration.flops, recipe: flops})
    figures: Figures = {"dim": size.dim, "seconds a step": fastest, "flops": flops}
    text = (
        f"{1e3 * fastest:.0f} ms a step of {size.batch} x {size.tokens} tokens, width {size.dim} "
        f"({format_flops(flops)}); loss {losses[0]:.2f} to {losses[-1]:.2f}"
    )
    if not losses[-1] < losses[0]:
        return problem(what, f"{text}: it does not fall", REPORT_IT), figures
    if subject.is_cpu:  # whose memory is measured in a process of its own
        return ok(what, text), figures
    peak = memory_peak(subject.device, before)
    if peak.reserved_nbytes >= _LARGE_NBYTES:
        lost = max(0.0, 1 - (before + peak.allocated_nbytes) / peak.reserved_nbytes)
        subject.calibrate(fragmentation_share=max(lost, subject.calibration.fragmentation_share or 0.0))
    figures["memory"] = ratio = predicted_nbytes(config, size.vocabulary)[0] / peak.allocated_nbytes
    text += f"; predicted / measured memory {ratio:.2f}"
    if abs(ratio - 1) > MEMORY_BAND:
        return warning(what, text, LAW_IS_OFF), figures
    return ok(what, text), figures


def _size(subject: Subject) -> Size:
    """The largest size of which a step takes about `_STEP_SECONDS`."""
    chosen = _STEP_SIZES[0]
    for size in _STEP_SIZES[: 2 if subject.quick else None]:
        config = run_config(size, subject.device, "fp32")
        costs = segment_costs(config.model.resolve(size.vocabulary), config)
        if sum(cost.flops_per_token for cost in costs) * size.batch * size.tokens < subject.flops * _STEP_SECONDS:
            chosen = size
    return chosen


def check_block_time(what: str, subject: Subject) -> tuple[Finding, Figures]:
    """Host time of one block, forward and backward, in a model so small that the device has nothing to do."""
    size = Size(dim=64, layers=_BLOCKS, batch=1, microbatch=1, tokens=8)
    config = run_config(size, subject.device, "fp32")
    engine, best = Engine(config, config.model.resolve(size.vocabulary)), float("inf")
    ids = torch.from_numpy(language(0, size.batch, size.tokens)).to(subject.device)
    for _ in range(5):
        synchronise(subject.device)
        started = time.perf_counter()
        engine.runner.gradients(0, (ids,))
        best = min(best, time.perf_counter() - started)
    microseconds = 1e6 * best / _BLOCKS
    text = f"{microseconds:.0f} µs of the host for each block, forward and backward"
    return ok(what, text), {"microseconds": microseconds}


class _Operators(TorchDispatchMode):
    """Collects the names of the attention operators that run in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _ATTENTION_NAMES:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def check_attention(what: str, subject: Subject) -> tuple[Finding, Figures]:
    """Which kernel computed the causal attention of a model with grouped queries, in the default recipe."""
    size = Size(dim=128, layers=1, batch=1, microbatch=1, tokens=_ATTENTION_TOKENS)
    recipe = subject.recipe("auto")
    config = run_config(size, subject.device, "auto")
    config = replace(config, model=replace(config.model, n_heads=2, n_kv_heads=1))
    model = config.model.resolve(size.vocabulary)
    engine = Engine(config, model)
    with _Operators() as seen:
        engine.step(0, language(0, size.batch, size.tokens), LEARNING_RATE)
    kernels = sorted(_ATTENTION_NAMES[name] for name in seen.names) or ["math"]
    is_math = any(kernel.startswith("math") for kernel in kernels)
    fused = kernel_for(recipe, attention_heads(model), subject.device)  # which may repeat keys and values
    subject.calibrate(attention="math" if is_math else fused)
    text = f"{', '.join(kernels)} in {recipe.name}, {_ATTENTION_TOKENS} tokens, grouped queries"
    figures: Figures = {"kernel": ", ".join(kernels)}
    if is_math:
        return warning(what, f"{text}: it keeps tokens x tokens scores", "Long texts need much more memory."), figures
    return ok(what, text), figures
