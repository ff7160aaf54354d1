"""Prints digests of what torch and the C library compute by themselves, without thinpipe.

Where these differ from the recorded ones the machine rounds differently, and no digest of a run can be compared.
"""

import hashlib
import json
import math

import torch
import torch.nn.functional as F


def large_product(x: torch.Tensor) -> torch.Tensor:
    """So many numbers that some are rounded to another bfloat16 when they were summed in another order."""
    more = torch.cat([x.roll(step, 1) * x for step in range(1, 25)], dim=1)
    return more.T @ more


FUNCTIONS = {
    "exp": torch.exp,
    "log": lambda x: x.abs().log(),
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "pow": lambda x: x.abs().pow(0.3),
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "sum": lambda x: x.sum(0),
    "norm": torch.linalg.vector_norm,
    "matrix product": lambda x: x @ x.T,
    "bfloat16 product": lambda x: large_product(x.bfloat16()),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "qr": lambda x: torch.linalg.qr(x)[0],
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False)[2],
    "eigh": lambda x: torch.linalg.eigh(x @ x.T)[1],
}


def bytes_sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    random = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    found = {"random numbers": bytes_sha256(random)}
    found |= {name: bytes_sha256(function(random)) for name, function in FUNCTIONS.items()}
    floats = [function(number / 7) for number in range(1, 500) for function in (math.exp, math.log, math.sin, math.cos)]
    found["Python's math"] = hashlib.sha256("\n".join(map(float.hex, floats)).encode()).hexdigest()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
