"""Copies between host and device: whether messages carry the right bytes, and how fast copies are."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from thinpipe.device.choice import CPU, synchronise
from thinpipe.device.device_class import deterministic_algorithms
from thinpipe.device.host_copies import (
    CopyToHost,
    has_pinned_memory,
    host_buffer,
    pinned,
    stream_through,
    to_device,
)
from thinpipe.doctor.finding import Finding, not_checked, ok, problem, warning
from thinpipe.selftest.check import REPORT_IT, Figures, Subject
from thinpipe.selftest.steps import train
from thinpipe.selftest.workload import SMALL, run_config

_NBYTES = 4 << 20
_COPIES = 4
_BUSY_SIZE, _BUSY_PRODUCTS = 512, 40
"""Matrix products that keep the device computing for some milliseconds, so that a copy that does not wait is too
early."""
_OFFLOAD_STEPS = 5
_RATE_NBYTES = 64 << 20
_RATE_SECONDS = 1.0


def check_copies(what: str, subject: Subject) -> tuple[Finding, Figures]:
    """Messages as the pipeline copies them, while the device is busy; then one copy without a wait, which must carry
    wrong bytes: otherwise the first part has shown nothing."""
    device = subject.device
    if not has_pinned_memory(device):
        if wrong := _difference(lambda: [_message(n).to(device).to(CPU) for n in range(_COPIES)], device):
            return problem(what, f"copies to the device and back: {wrong}", REPORT_IT), {}
        return ok(what, "copies are not asynchronous on this device, and carry the right bytes"), {}
    for name, copy in (("to the host", _to_host), ("to the device", _to_device)):
        if wrong := _difference(partial(copy, device), device):
            return problem(what, f"a copy {name} does not wait for what it depends on: {wrong}", REPORT_IT), {}
    if not _difference(partial(_without_wait, device), device):
        return not_checked(what, "right bytes, but a copy without a wait had them too: the device was not busy"), {}
    return ok(what, f"{2 * _COPIES} messages have the right bytes, and a copy without a wait was noticed"), {}


def check_offload(what: str, subject: Subject) -> tuple[Finding, Figures]:
    """State that streams from the host through the device and back, and steps with it against steps without."""
    device = subject.device
    if not has_pinned_memory(device):
        return ok(what, "training.offload has no effect on a device that uses the host's memory"), {}
    if wrong := _difference(partial(_through_device, device), device):
        return problem(what, f"a copy through the device does not wait for what it depends on: {wrong}", REPORT_IT), {}
    config = run_config(SMALL, device, "fp32")
    offloaded = replace(config, training=replace(config.training, offload="optimizer"))
    with deterministic_algorithms(subject.is_deterministic):
        equal = train(offloaded, _OFFLOAD_STEPS) == train(config, _OFFLOAD_STEPS)
    if equal:
        return ok(
            what, f"{_OFFLOAD_STEPS} steps with optimiser state in host memory have the bits of steps without"
        ), {}
    text = f"{_OFFLOAD_STEPS} steps with optimiser state in host memory have other bits than steps without"
    if subject.is_deterministic:
        return problem(what, text, REPORT_IT), {}
    return warning(what, text, "Nothing: the device does not repeat its own bits either."), {}


def _message(number: int) -> Tensor:
    return torch.arange(_NBYTES).mul_(number + 2).remainder_(251).to(torch.uint8)


def _computed(number: int, device: torch.device) -> Tensor:
    """The message, computed on the device behind much other work."""
    _keep_busy(device)
    return torch.arange(_NBYTES, device=device).mul_(number + 2).remainder_(251).to(torch.uint8)


def _keep_busy(device: torch.device) -> None:
    x = torch.ones(_BUSY_SIZE, _BUSY_SIZE, device=device)
    for _ in range(_BUSY_PRODUCTS):
        x = x @ x


def _to_host(device: torch.device) -> list[Tensor]:
    copies = [CopyToHost(_computed(number, device)) for number in range(_COPIES)]
    for copy in copies:
        copy.wait()
    return [copy.host for copy in copies]


def _to_device(device: torch.device) -> list[Tensor]:
    """Each message is used behind other work, when its memory may already have been given to the next one."""
    found = []
    for number in range(_COPIES):
        received = host_buffer(_NBYTES, device).copy_(_message(number))
        arrived = to_device(received, device)
        found.append(arrived.clone())
        _keep_busy(device)
        found[-1] = arrived.bitwise_xor(found[-1]).add_(arrived)
        del received, arrived
    return [tensor.to(CPU) for tensor in found]


def _through_device(device: torch.device) -> list[Tensor]:
    """Messages that the device has changed, and the host changes back."""
    batches = [[pinned(_message(number))] for number in range(_COPIES)]
    for (here,) in stream_through(batches, device):
        _keep_busy(device)
        here.add_(1)
    return [batch[0] - 1 for batch in batches]


def _without_wait(device: torch.device) -> list[Tensor]:
    message, host = _computed(0, device), torch.empty(_NBYTES, dtype=torch.uint8, pin_memory=True)
    host.zero_()
    with torch.Stream(device):
        host.copy_(message, non_blocking=True)
    found = host.clone()
    synchronise(device)
    return [found]


def _difference(copy: Callable[[], list[Tensor]], device: torch.device) -> str:
    """What is wrong with the copied messages; empty if nothing. A device that watches the order of its work, as the
    simulated one of the tests, raises RuntimeError for a copy that does not wait."""
    try:
        found = copy()
    except RuntimeError as error:
        with suppress(RuntimeError):
            synchronise(device)
        return str(error).splitlines()[0]
    differ = sum(int((one != _message(number)).sum()) for number, one in enumerate(found))
    return f"{differ:,} of {len(found) * _NBYTES:,} bytes are wrong" if differ else ""


def check_copy_rates(what: str, subject: Subject) -> tuple[Finding, Figures]:
    """Bytes per second in each direction, with pinned host memory and without."""
    device = subject.device
    if subject.is_cpu:
        return ok(what, "a CPU copies nothing"), {}
    on_device, rates = torch.zeros(_RATE_NBYTES, dtype=torch.uint8, device=device), {}
    for is_pinned in (True, False) if has_pinned_memory(device) else (False,):
        host = torch.zeros(_RATE_NBYTES, dtype=torch.uint8, pin_memory=is_pinned)
        name = "pinned" if is_pinned else "pageable"
        rates[f"to device, {name}"] = _rate(on_device, host, device)
        rates[f"to host, {name}"] = _rate(host, on_device, device)
    if has_pinned_memory(device):
        subject.calibrate(
            to_device_bytes_per_second=rates["to device, pinned"], to_host_bytes_per_second=rates["to host, pinned"]
        )
    text = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())
    return ok(what, text), dict(rates)


def _rate(target: Tensor, source: Tensor, device: torch.device) -> float:
    """Bytes per second, the best of several copies: disturbances only make a copy slower."""
    best, began = 0.0, time.monotonic()
    while time.monotonic() - began < _RATE_SECONDS / 4:
        synchronise(device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronise(device)
        best = max(best, source.numel() / (time.perf_counter() - started))
    return best
