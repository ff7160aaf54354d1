"""Adds adapters to the matrices of their base, tensor by tensor as the base has them on disk."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from thinpipe.config.huggingface_model import HuggingFaceModelConfig, LoraConfig
from thinpipe.core.errors import UserError
from thinpipe.models.hf.base_statement import base_sha256
from thinpipe.models.hf.base_tensors import TensorSource
from thinpipe.models.hf.decoder import HuggingFaceModel
from thinpipe.models.hf.quantised import as_quantised, is_quantised
from thinpipe.models.protocol import base_hashes


@dataclass(frozen=True)
class Merging:
    """What happens to the tensors of a base."""

    config: HuggingFaceModelConfig
    adapters: Mapping[str, Tensor]
    """By their names in transformers."""
    dtype: torch.dtype
    """Data type of the run's weights."""
    quantised: frozenset[str]
    """Modules that the run has quantised."""
    transposed: frozenset[str]
    """Modules whose matrix is stored as inputs x outputs."""
    used: set[str] = field(default_factory=set)
    """Modules whose adapter was added."""

    @classmethod
    def of(cls, config: HuggingFaceModelConfig, adapters: Mapping[str, Tensor], dtype: torch.dtype) -> "Merging":
        """Reads the base once, block by block, to compare its hash. Raises UserError if it is another base."""
        finest = replace(config, boundaries=tuple(range(1, config.n_layers)))
        model = HuggingFaceModel(finest)
        quantised, transposed, hashes = set[str](), set[str](), set[str]()
        for segment in model.segments:
            plain = {segment.huggingface_name(name): module for name, module in _matrices(segment)}
            transposed |= {name for name, module in plain.items() if isinstance(module, Conv1D)}
            segment.materialise(seed=0, dtype=dtype)
            quantised |= {segment.huggingface_name(n) for n, module in _matrices(segment) if is_quantised(module)}
            hashes |= base_hashes([segment])
            segment.release()
        if config.base_sha256 and base_sha256(hashes) != config.base_sha256:
            raise UserError(
                f"{config.source} is not the base that the run was trained on: its tensors have the sha256 "
                f"{base_sha256(hashes)}, and those of the base had {config.base_sha256}"
            )
        return cls(config, adapters, dtype, frozenset(quantised), frozenset(transposed))

    def merged(self, stored_name: str, stored: TensorSource) -> Tensor:
        """A tensor of the base as the merged model has it."""
        tensor = stored.read(stored_name)
        module = self._module_of(stored_name)
        if module is None:
            return tensor
        wide = tensor.T if module in self.transposed else tensor
        kind = self.config.quantize_base
        if kind is not None and module in self.quantised:
            wide = as_quantised(wide.to(self.dtype), kind)
        change = self._change(module)
        if change is not None:
            self.used.add(module)
            wide = wide.to(change.dtype) + change
        return (wide.T if module in self.transposed else wide).to(tensor.dtype).contiguous()

    def _module_of(self, stored_name: str) -> str | None:
        """The module in transformers of a stored matrix, whose name may lack the name of the decoder."""
        if not stored_name.endswith(".weight"):
            return None
        name = stored_name.removesuffix(".weight")
        known = self.quantised | {_module_of_adapter(each) for each in self.adapters}
        return next((each for each in known if each == name or each.partition(".")[2] == name), None)

    def _change(self, module: str) -> Tensor | None:
        """What the adapter of a module adds to its matrix, outputs x inputs."""
        down, up = (self.adapters.get(f"{module}.{part}.default.weight") for part in ("lora_A", "lora_B"))
        if down is None or up is None:
            return None
        assert self.config.lora is not None
        return up @ down * scaling(self.config.lora)

    def refuse_unused(self) -> None:
        """Raises UserError for an adapter whose matrix the base does not store under its own name."""
        unused = sorted({_module_of_adapter(name) for name in self.adapters} - self.used)
        if unused:
            raise UserError(
                f"the base has no tensor of {unused[0]} by itself, so it cannot be merged here: export without "
                "--merge, and merge with peft's merge_and_unload"
            )


def stores_transposed(model: HuggingFaceModel) -> bool:
    """Whether the matrices of blocks are stored as inputs x outputs, as GPT-2's are."""
    return any(isinstance(module, Conv1D) for module in model.modules())


def scaling(lora: LoraConfig) -> float:
    return lora.lora_alpha / (math.sqrt(lora.r) if lora.use_rslora else lora.r)


def _module_of_adapter(name: str) -> str:
    return name.rsplit(".", 3)[0]


def _matrices(segment: Any) -> list[tuple[str, nn.Module]]:
    """Modules of blocks with weights by their names in the segment; of an adapted one, the module that it adapts."""
    return [
        (name.removesuffix(".base_layer"), module)
        for name, module in segment.named_modules()
        if name.startswith("blocks.") and hasattr(module, "weight") and ".lora_" not in name
    ]
