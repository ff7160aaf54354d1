"""Single operations of the models on the device, forward and backward, against float64 on the CPU.

Errors are norms of differences, relative to the norm of the exact result. Bands, with the unit roundoff u of the data
type in which the operation computes and stores (inputs are rounded before both compute):

    float32   1e-5    u = 6e-8. Sums of 512 products in any order stay below 1e-6; TF32, with 10 bits of mantissa, is
                      near 3e-4 and would be found
    bfloat16  3e-2    u = 4e-3 for each result that is stored, one to three of them in each operation; a CPU sums the
                      gradient of a bias in bfloat16, too, and reaches 1e-2
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.device.choice import CPU
from thinpipe.device.counter_random import uniform
from thinpipe.doctor.finding import Finding, ok, problem
from thinpipe.selftest.check import REPORT_IT, Figures, Subject

BANDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
_TOKENS, _WIDTH = 67, 512


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _cross_entropy(logits: Tensor) -> Tensor:
    targets = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")


def _embedding(table: Tensor) -> Tensor:
    return F.embedding(torch.arange(2 * len(table), device=table.device).mul_(5) % len(table), table)


KERNELS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "matrix product": (F.linear, ((_TOKENS, _WIDTH), (384, _WIDTH))),
    "batched matrix product": (torch.matmul, ((6, _TOKENS, 64), (6, 64, _TOKENS))),
    "RMS norm": (lambda x, weight: F.rms_norm(x, (_WIDTH,), weight), ((_TOKENS, _WIDTH), (_WIDTH,))),
    "layer norm": (
        lambda x, weight, bias: F.layer_norm(x, (_WIDTH,), weight, bias),
        ((_TOKENS, _WIDTH), (_WIDTH,), (_WIDTH,)),
    ),
    "softmax": (lambda x: F.softmax(4 * x, -1), ((_TOKENS, _WIDTH),)),
    "cross-entropy": (_cross_entropy, ((_TOKENS, _WIDTH),)),
    "SiLU": (F.silu, ((_TOKENS, _WIDTH),)),
    "GELU": (lambda x: F.gelu(x, approximate="tanh"), ((_TOKENS, _WIDTH),)),
    "embedding": (_embedding, ((64, _WIDTH),)),
    "attention": (_attention, ((2, 4, _TOKENS, 64),) * 3),
    "attention with grouped queries": (_attention, ((2, 4, _TOKENS, 64), (2, 2, _TOKENS, 64), (2, 2, _TOKENS, 64))),
}
"""Operations and the shapes of their inputs."""


def check_kernels(what: str, subject: Subject, *, dtype: torch.dtype) -> tuple[Finding, Figures]:
    """Every operation, forward and backward."""
    if dtype == torch.bfloat16:
        subject.recipe("bf16")
    band, errors, wrong = BANDS[dtype], dict[str, float](), list[str]()
    for name, (function, shapes) in KERNELS.items():
        try:
            errors[name] = max(_relative_errors(function, shapes, subject.device, dtype))
        except Exception as error:  # an operation that the device lacks
            wrong.append(f"{name} stopped: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        if not errors[name] <= band:
            wrong.append(f"{name} is wrong by {errors[name]:.1e} (allowed: {band:g})")
    if wrong:
        return problem(what, "; ".join(wrong), REPORT_IT), dict(errors)
    worst = max(errors, key=lambda name: errors[name])
    text = f"{len(errors)} operations within {errors[worst]:.1e} of float64 (allowed: {band:g}; worst: {worst})"
    return ok(what, text), dict(errors)


def _relative_errors(
    function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype
) -> list[float]:
    """Of the output and of the gradient of every input."""
    inputs = [_numbers(shape, number).to(dtype) for number, shape in enumerate(shapes)]
    found = _forward_and_backward(function, [tensor.to(device) for tensor in inputs])
    exact = _forward_and_backward(function, [tensor.double() for tensor in inputs])
    return [relative_error(one, other) for one, other in zip(found, exact, strict=True)]


def _forward_and_backward(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    gradient = _numbers(tuple(output.shape), 99).to(output.device, output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference, relative to the norm of `exact`, in float64 on the CPU. NaN stays NaN."""
    exact = exact.to(CPU).double()
    return float((found.to(CPU).double() - exact).norm() / exact.norm())


def _numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers on the CPU between -1 and 1 that bfloat16 holds exactly, so that rounding them changes nothing."""
    like = torch.empty(shape)
    return (2 * uniform(like, "selftest", seed) - 1).bfloat16().float()


def check_random_numbers(what: str, subject: Subject) -> tuple[Finding, Figures]:
    """Random numbers of dropout and stochastic rounding are integer arithmetic: equal in every bit on every device."""
    like = torch.empty(1000, 1001)
    differ = int((uniform(like.to(subject.device), "selftest").to(CPU) != uniform(like, "selftest")).sum())
    if differ:
        text = (
            f"{differ:,} of {like.numel():,} random numbers differ from the CPU's: 32-bit integers do not wrap around"
        )
        return problem(what, text, REPORT_IT), {"different": differ}
    return ok(what, f"{like.numel():,} random numbers of dropout and rounding equal the CPU's"), {"different": 0}
