"""Memory and work of a run on a Hugging Face model, segment by segment, from the shapes of its tensors. Imports no
torch or transformers.

Weights, gradients and moments are counted to the tensor: a frozen weight takes its own bytes and no more, a weight of
an adapter 16. Activations are an estimate from the shapes of a block's matrices, whatever the block computes
(`benchmarks/memory_law.py` compares it with the allocator).

FLOPs per token, forward and backward, for sequence length S and queries of A numbers:

    6 x matrix elements       if all weights are trained: the head included, embeddings not
    4 x matrix elements       if they are frozen: the product, and the gradient of its input
  + 6 x elements of adapters
  + 12 x S x A per block      attention, without the mask
  + 2 x matrix elements       of what is computed again: blocks under activation checkpointing, and the head where the
                              logits are too many to exist at once
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from thinpipe.config.huggingface_model import LoraConfig, QuantizedBase
from thinpipe.config.model_family import MAX_LOGITS
from thinpipe.config.offload import keeps_masters
from thinpipe.config.run import RunConfig
from thinpipe.core.units import BF16_NBYTES, ITEM_NBYTES
from thinpipe.planning.segment_cost import SegmentCost
from thinpipe.planning.stored_model import Shape, StoredModel

_QUANTISED_BITS: Mapping[QuantizedBase, float] = {"nf4": 4 + 8 / 64 + 32 / (64 * 256), "int8": 8.0}
"""Bits of a weight, with its share of scales: in nf4 one of 8 bits for 64 weights, and one of 32 for 256 of those."""
_EXPERTS = ".experts."


def stored_segment_costs(model: StoredModel, config: RunConfig) -> list[SegmentCost]:
    """Costs of every segment, in model order."""
    return [_Segment(model=model, config=config, index=index).cost() for index in range(len(model.segments))]


@dataclass(frozen=True, kw_only=True)
class _Segment:
    model: StoredModel
    config: RunConfig
    index: int

    def cost(self) -> SegmentCost:
        config, recipe = self.config, self.config.planned_recipe
        everything = [*self._in_blocks(), *self._ends()]
        shapes = [shape for _, shape in everything]
        if config.lora is None:
            itemsize, frozen = recipe.itemsize, 0
            moments = [recipe.moments_nbytes(shape, math.prod(shape)) for shape in shapes]
        else:
            frozen = sum(math.ceil(_frozen_nbytes(config, name, shape)) for name, shape in self._in_blocks())
            frozen += recipe.itemsize * sum(math.prod(shape) for _, shape in self._ends())
            shapes = [each for name, shape in self._in_blocks() for each in adapter_shapes(name, shape, config.lora)]
            itemsize = ITEM_NBYTES["float32"]
            moments = [2 * itemsize * math.prod(shape) for shape in shapes]
        numel = sum(map(math.prod, shapes))
        is_offloaded = config.training.offload == "optimizer"
        forward, backward = self._flops_per_token()
        return SegmentCost(
            parameters=numel,
            forward_flops_per_token=forward,
            backward_flops_per_token=backward,
            weights_nbytes=itemsize * numel,
            gradients_nbytes=itemsize * numel,
            optimiser_nbytes=sum(moments),
            activation_nbytes=self._saved_nbytes(),
            peak_extra_nbytes=self._working_nbytes(),
            copies_nbytes=self._copies_nbytes(),
            frozen_nbytes=frozen,
            download_nbytes=int(self.model.item_nbytes * sum(math.prod(shape) for _, shape in everything)),
            offloaded_nbytes=sum(moments) if is_offloaded else 0,
            masters_nbytes=self._masters_nbytes(),
            slices_nbytes=recipe.update_nbytes(shapes) if config.lora is None else 0,
            streamed=tuple((shape[0], nbytes // shape[0]) for shape, nbytes in zip(shapes, moments, strict=True))
            if is_offloaded
            else (),
        )

    @property
    def _is_last(self) -> bool:
        return self.index == len(self.model.segments) - 1

    def _in_blocks(self) -> Iterator[tuple[str, Shape]]:
        for block in self.model.segments[self.index]:
            yield from self.model.blocks[block].items()

    def _ends(self) -> Iterator[tuple[str, Shape]]:
        """Tensors before and after the blocks. A tied head is the embedding itself if there is one segment, else a
        copy."""
        if self.index == 0:
            yield from self.model.first.items()
        if self._is_last:
            is_whole = self.index == 0
            yield from (item for item in self.model.last.items() if not is_whole or item[0] not in self.model.first)

    @property
    def _head_numel(self) -> int:
        """Elements of the head's matrix, tied or not."""
        matrices = (shape for shape in self.model.last.values() if len(shape) == 2)
        return sum(map(math.prod, matrices)) if self._is_last else 0

    def _flops_per_token(self) -> tuple[float, float]:
        lora = self.config.lora
        blocks = attention = adapters = 0.0
        for block in self.model.segments[self.index]:
            attention += 2 * self.config.training.seq_len * self.model.attention_width
            for name, shape in self.model.blocks[block].items():
                blocks += self._used_numel(name, shape)
                adapters += sum(map(math.prod, adapter_shapes(name, shape, lora))) if lora is not None else 0
        passes = 2 if lora is None else 1  # backward: gradients of inputs, and of weights unless they are frozen
        recomputed = {"none": 0.0}.get(self.config.execution.checkpoint_activations, blocks + attention + adapters)
        if self._has_chunked_loss:
            recomputed += self._head_numel
        forward = blocks + attention + adapters + self._head_numel
        backward = passes * (blocks + self._head_numel) + 2 * (attention + adapters) + recomputed
        return 2 * forward, 2 * backward

    def _used_numel(self, name: str, shape: Shape) -> float:
        """Elements of a matrix with which a token is multiplied."""
        return self._share(name) * math.prod(shape) if len(shape) > 1 else 0.0

    def _share(self, name: str) -> float:
        return self.model.active_experts if _EXPERTS in name else 1.0

    @property
    def _has_chunked_loss(self) -> bool:
        return self._is_last and self._tokens * self.model.vocab_size > MAX_LOGITS

    @property
    def _tokens(self) -> int:
        return self.config.microbatch_size * self.config.training.seq_len

    def _masters_nbytes(self) -> int:
        config, recipe = self.config, self.config.planned_recipe
        schedule = config.parallelism.pipeline_parallel_schedule
        if config.lora is not None or not keeps_masters(config.training.offload, recipe, schedule):
            return 0
        return recipe.itemsize * self._matrices_numel

    def _copies_nbytes(self) -> int:
        """bfloat16 copies that autocast keeps of trained matrices, unless blocks are computed again."""
        config = self.config
        is_kept = config.planned_recipe.autocast_bf16 and config.execution.checkpoint_activations == "none"
        if config.lora is not None or not is_kept or self._masters_nbytes():
            return 0
        return BF16_NBYTES * (self._matrices_numel + self._head_numel)

    @property
    def _matrices_numel(self) -> int:
        return sum(math.prod(shape) for name, shape in self._in_blocks() if is_matrix(name, shape))

    def _block_nbytes(self, block: Mapping[str, Shape]) -> int:
        """Estimate of what autograd saves in a block: inputs and outputs of its matrices, and about four states."""
        recipe, lora = self.config.planned_recipe, self.config.lora
        itemsize = BF16_NBYTES if recipe.uses_bf16 else recipe.itemsize
        matrices = [(name, shape) for name, shape in block.items() if is_matrix(name, shape)]
        widths = sum(self._share(name) * sum(shape) for name, shape in matrices)
        per_token = int(itemsize * widths) + 4 * self.model.dim * recipe.itemsize
        copies = 0
        if lora is not None:  # the output of rank r, and what differs from a trained matrix
            adapted = [shape for name, shape in matrices if adapter_shapes(name, shape, lora)]
            inputs = sum(shape[-1] for shape in adapted)
            per_token += 4 * lora.r * len(adapted) + self._kept_by_adapters * inputs
            per_token += 5 * inputs if lora.lora_dropout else 0
            if recipe.autocast_bf16:  # of frozen weights, once for each micro-batch
                copies = BF16_NBYTES * sum(math.prod(shape) for _, shape in matrices)
        return self._tokens * per_token + copies

    @property
    def _kept_by_adapters(self) -> int:
        """Bytes of a number of an adapter's input beside that of its matrix. A frozen matrix keeps no input, one of
        bitsandbytes does; the adapter reads it in float32."""
        recipe, is_quantised = self.config.planned_recipe, self.config.model.quantize_base is not None
        if not recipe.uses_bf16 or recipe.autocast_bf16:
            return 0
        return ITEM_NBYTES["float32"] - (0 if is_quantised else BF16_NBYTES)

    @property
    def _all_blocks_nbytes(self) -> list[int]:
        return [self._block_nbytes(self.model.blocks[block]) for block in self.model.segments[self.index]]

    def _saved_nbytes(self) -> int:
        """Activations of a micro-batch between its forward and its backward pass."""
        state = self._tokens * self.model.dim * self.config.planned_recipe.itemsize
        match self.config.execution.checkpoint_activations:
            case "none":
                return sum(self._all_blocks_nbytes)
            case "block":
                return state * len(self.model.segments[self.index])
        return state

    def _working_nbytes(self) -> int:
        """Bytes beside saved activations while the segment computes."""
        match self.config.execution.checkpoint_activations:
            case "none":
                working = 0
            case "block":
                working = max(self._all_blocks_nbytes)
            case _:
                working = sum(self._all_blocks_nbytes)
        return max(working, self._loss_nbytes())  # the loss is over when blocks are computed again

    def _loss_nbytes(self) -> int:
        """Logits, their float32 and their gradient; with chunks of the tokens also the gradient of the head from one of
        them, beside the sum."""
        if not self._is_last:
            return 0
        logits = 3 * ITEM_NBYTES["float32"] * min(self._tokens * self.model.vocab_size, MAX_LOGITS)
        is_summed = self._has_chunked_loss and self.config.lora is None
        return logits + (self.config.planned_recipe.itemsize * self._head_numel if is_summed else 0)


def is_matrix(name: str, shape: Shape) -> bool:
    return len(shape) == 2 and name.endswith(".weight")


def adapter_shapes(name: str, shape: Shape, lora: LoraConfig) -> Iterable[Shape]:
    """Shapes of the two matrices of an adapter beside a tensor; none if it gets none."""
    if not is_matrix(name, shape) or _EXPERTS in name:
        return ()
    targets, layer = lora.target_modules, name.removesuffix(".weight")
    if isinstance(targets, str):
        is_target = targets == "all-linear" or re.fullmatch(targets, layer) is not None
    else:
        is_target = any(layer == each or layer.endswith(f".{each}") for each in targets)
    return ((lora.r, shape[1]), (shape[0], lora.r)) if is_target else ()


def _frozen_nbytes(config: RunConfig, name: str, shape: Shape) -> float:
    kind = config.model.quantize_base
    if kind is None or not is_matrix(name, shape) or _EXPERTS in name:  # experts are merged to one tensor first
        return config.planned_recipe.itemsize * math.prod(shape)
    return math.prod(shape) * _QUANTISED_BITS[kind] / 8
