"""Every boundary method of the registry, there and back, on the device against the CPU.

Equal numbers have equal messages, byte for byte, where thinpipe promises it: fp32 and bf16, and token ids. Integers,
top-k and low rank divide, sort and decompose, so a value between two codes may fall to either side: their messages may
differ, but the error of what is decoded must not be larger than on the CPU, and both must decode the same message to
the same values, because EF21 and AQ-SGD keep a copy of them at both ends.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod, MessageId, MessageShape
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.registry import COMPRESSORS, FEEDBACKS, FORMAT_COMPRESSORS, make_method
from thinpipe.config.boundary import COMPRESSION_SETTINGS, BoundaryConfig, CompressionConfig
from thinpipe.device.choice import CPU
from thinpipe.device.counter_random import uniform
from thinpipe.doctor.finding import Finding, ok, problem
from thinpipe.selftest.check import REPORT_IT, Figures, Subject
from thinpipe.selftest.kernels import relative_error

_SHAPE = MessageShape(batch=2, tokens=24, width=64, vocab_size=50_000, dtype=torch.float32)
_REQUIRED: dict[str, float] = {"keep": 0.25, "bits": 4, "rank": 4}
"""Values of the setting that each compressor requires."""
_PROMISED = ("fp32", "bf16")
"""Number formats whose messages have the same bytes on every device."""
_MESSAGES = 3
_ERROR_BAND = 1e-3
"""Largest difference of the errors of decoded values on the two devices, relative to the values."""
_DECODED_BAND = 1e-5
"""Largest relative difference of values that the two devices decode from one message."""


def methods() -> Iterator[tuple[str, BoundaryConfig, bool]]:
    """Name, settings, and whether the bytes of messages are promised to be equal on all devices."""
    for method in FORMAT_COMPRESSORS:
        for name in FORMATS:
            settings = BoundaryConfig(method=method, forward=name, backward=name)  # type: ignore[arg-type]
            yield f"{method} {name}", settings, name in _PROMISED
    for kind in COMPRESSORS:
        required = COMPRESSION_SETTINGS[kind][0]
        for feedback in FEEDBACKS:
            fields = {"kind": kind, required: type(_REQUIRED[required])(_REQUIRED[required])}
            states = CompressionConfig(**fields, feedback=feedback)  # type: ignore[arg-type]
            gradients = CompressionConfig(**fields, feedback="ef" if feedback == "aqsgd" else feedback)  # type: ignore[arg-type]
            yield f"{kind} {feedback}", BoundaryConfig(states=states, gradients=gradients), False
    reused = CompressionConfig(kind="topk", reuse_mask=True)
    yield "topk mask", BoundaryConfig(states=CompressionConfig(kind="topk", keep=0.25), gradients=reused), False


def check_boundaries(what: str, subject: Subject) -> tuple[Finding, Figures]:
    figures: Figures = {}
    wrong: list[str] = []
    for name, settings, promised in methods():
        try:
            differ, error, decoded = _compare(settings, subject.device)
        except Exception as failure:  # an operation that the device lacks
            figures[name] = "stopped"
            wrong.append(f"{name} stopped: {type(failure).__name__}: {str(failure).splitlines()[0]}")
            continue
        figures[name] = differ
        if promised and differ:
            wrong.append(f"{name}: {differ:.2%} of the bytes differ")
        elif not error <= _ERROR_BAND:
            wrong.append(f"{name}: decoded values are off by {error:.1e} more than on the CPU")
        elif not decoded <= _DECODED_BAND:
            wrong.append(f"{name}: one message is decoded to values that differ by {decoded:.1e}")
    if wrong:
        return problem(what, "; ".join(wrong), REPORT_IT), figures
    unlike = [name for name, differ in figures.items() if differ]
    text = f"{len(figures)} methods there and back: {len(figures) - len(unlike)} with the bytes of the CPU"
    if unlike:
        text += f"; within a band, as they may be: {', '.join(unlike)}"
    return ok(what, text), figures


def _compare(settings: BoundaryConfig, device: torch.device) -> tuple[float, float, float]:
    """Share of message bytes that differ, error of decoded values above that on the CPU, and relative difference of the
    values that both decode from the CPU's messages. Several messages, since feedback has state."""
    in_subspace = settings.method == "subspace"
    ends = {
        place: [make_method(settings, _SHAPE, in_subspace=in_subspace, seed=5) for _ in range(2)]
        for place in (CPU, device)
    }
    foreign = make_method(settings, _SHAPE, in_subspace=in_subspace, seed=5)  # decodes the CPU's messages on the device
    differ = total = 0
    error = decoded = 0.0
    for step in range(_MESSAGES):
        message_id = MessageId(seed=5, step=step, microbatch=0, boundary=0)
        ids_BW, state, gradient = _numbers(step)
        for values, is_state in ((state, True), (gradient, False)):
            sent, received = {}, {}
            for place, (sender, receiver) in ends.items():
                sent[place], received[place] = _there_and_back(
                    sender, receiver, ids_BW.to(place), values.to(place), message_id, is_state=is_state
                )
            differ += int((sent[device].to(CPU) != sent[CPU]).sum())
            total += sent[CPU].numel()
            own, exact = relative_error(received[device], values), relative_error(received[CPU], values)
            error = max(error, own - exact, 0.0 if own == own else own)
            if is_state:
                _, again = foreign.unpack_forward(sent[CPU].to(device), message_id)
                decoded = max(decoded, relative_error(again, received[CPU]))
    return differ / total, error, decoded


def _there_and_back(
    sender: BoundaryMethod,
    receiver: BoundaryMethod,
    ids_BW: Tensor,
    values: Tensor,
    message_id: MessageId,
    *,
    is_state: bool,
) -> tuple[Tensor, Tensor]:
    """Message and decoded values of a state, or of a gradient on its way back."""
    if not is_state:
        message = receiver.pack_backward(values, message_id)
        return message, sender.unpack_backward(message, message_id)
    message = sender.pack_forward(ids_BW, values, message_id)
    found, state = receiver.unpack_forward(message, message_id)
    if not torch.equal(found, ids_BW):
        raise ValueError("token ids do not survive the message")
    return message, state


def _numbers(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, a state and a gradient on the CPU. Channels have unlike sizes, so that low-rank parts are distinct."""
    shape = _SHAPE.batch, _SHAPE.tokens, _SHAPE.width
    scale = torch.linspace(0, 4, _SHAPE.width).neg().exp()
    state, gradient = ((uniform(torch.empty(shape), name, step) - 0.5) * scale for name in ("state", "gradient"))
    ids = uniform(torch.empty(_SHAPE.batch, _SHAPE.tokens + 1), "ids", step).mul_(_SHAPE.vocab_size).long()
    return ids, state, gradient
