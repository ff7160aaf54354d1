"""Matrices of a frozen base in 4 or 8 bits, by the library bitsandbytes: transformers' loader quantises each when it
has read it, and peft adapts what it finds.

Works on CPUs and on NVIDIA, AMD and Intel GPUs, wherever bitsandbytes does. The bits of a quantised weight, and what is
computed with it, are the library's own.
"""

import importlib
import logging
from typing import Any

import torch
import transformers

from thinpipe.config.huggingface_model import QuantizedBase
from thinpipe.core.errors import UserError
from thinpipe.device.precision import QUANTISED_DEVICES


def quantisation(kind: QuantizedBase | None, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' settings for its loader; None: not quantised. `dtype`: of what is computed. Raises UserError."""
    if kind is None:
        return None
    if device.type not in QUANTISED_DEVICES:
        raise UserError(
            f"model.quantize_base works on {', '.join(QUANTISED_DEVICES)}, not on {device.type}: leave it out, or set "
            "training.device"
        )
    if kind == "int8":
        # It says in every layer that it computes with inputs in float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return transformers.BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_packing(model: Any) -> None:
    """On some processors bitsandbytes packs 4-bit weights anew for evaluation, and back for training: not here, so that
    a run that validates has the bits of one that does not."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantised(module: Any) -> bool:
    """Whether it is a linear layer of bitsandbytes; peft's around it has the same name."""
    return type(module).__module__.startswith("bitsandbytes.") and hasattr(module, "weight")


def as_quantised(matrix: torch.Tensor, kind: QuantizedBase) -> torch.Tensor:
    """A matrix, outputs x inputs, rounded to what its quantised form holds."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    if kind == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(matrix.to(torch.float16).contiguous())
        wide: torch.Tensor = functional.int8_vectorwise_dequant(codes, scales)
        return wide
    codes, state = functional.quantize_4bit(matrix.contiguous(), quant_type=kind, compress_statistics=True)
    rounded: torch.Tensor = functional.dequantize_4bit(codes, state)
    return rounded
