"""Memory of a run on a Hugging Face model, from the shapes of its tensors on disk. Imports no torch or transformers.

Weights, gradients and moments are counted to the tensor: a frozen weight takes its own bytes and no more, a weight of
an adapter 16.
Activations are an estimate from the shapes of a block's matrices, whatever the block computes
(`tests/huggingface/test_memory.py` compares it with what autograd saves). Speed is not predicted.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinpipe.config.huggingface_model import HUB_PREFIX, LoraConfig, QuantizedBase
from thinpipe.config.model_family import MAX_LOGITS
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.safetensors_header import tensor_places
from thinpipe.core.units import ITEM_NBYTES
from thinpipe.pipeline.placement import in_flight_microbatches, place
from thinpipe.planning.machine_loads import MemoryUse, peak_in_flight
from thinpipe.planning.memory_budget import PROCESS_NBYTES, MemoryBudget
from thinpipe.planning.partition import SegmentNeeds
from thinpipe.planning.simulation.schedule_actions import action_lists

Shape = tuple[int, ...]
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")
_TABLE = re.compile(r"(?:^|[._])(?:wte|wpe|\w*emb\w*)\.")
_QUANTISED_BITS: Mapping[QuantizedBase, float] = {"nf4": 4 + 8 / 64 + 32 / (64 * 256), "int8": 8.0}
"""Bits of a weight, with its share of scales: in nf4 one of 8 bits for 64 weights, and one of 32 for 256 of those."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """Shapes of the tensors of a base by name: those of each block, and those before and after the blocks."""

    blocks: tuple[Mapping[str, Shape], ...]
    first: Mapping[str, Shape]
    last: Mapping[str, Shape]
    vocab_size: int

    @classmethod
    def read(cls, folder: Path) -> "StoredModel":
        """Reads the headers of a folder's safetensors files. Raises UserError."""
        return cls.of(_shapes(folder), str(folder), _stated_vocabulary(folder))

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, Shape]], source: str, vocab_size: int | None) -> "StoredModel":
        """From the names and shapes of the tensors of a base. `vocab_size`: as config.json says; None: rows of the
        largest embedding. Raises UserError."""
        blocks: dict[int, dict[str, Shape]] = {}
        first, last = dict[str, Shape](), dict[str, Shape]()
        for name, shape in shapes:
            index = _BLOCK.search(name)
            where = first if _TABLE.search(name) else last
            (blocks.setdefault(int(index[1]), {}) if index else where)[name] = shape
        if not blocks:
            raise UserError(f"{source} has no safetensors files with blocks")
        vocabulary = vocab_size or max((shape[0] for shape in first.values()), default=0)
        if not any(shape[0] == vocabulary for shape in last.values()):  # a tied head: the last has a copy
            last |= {name: shape for name, shape in first.items() if shape[0] == vocabulary}
        in_order = tuple(blocks[index] for index in sorted(blocks))
        return cls(blocks=in_order, first=first, last=last, vocab_size=vocabulary)

    @property
    def width(self) -> int:
        return min(shape[-1] for shape in self.first.values() if len(shape) == 2)


def stored_model_of(config: RunConfig) -> StoredModel | None:
    """The base of a run; None if the run has none, or if it is on a model hub, where its files may not be here yet."""
    source = config.model.hf
    return None if source is None or source.startswith(HUB_PREFIX) else StoredModel.read(Path(source))


def _stated_vocabulary(folder: Path) -> int | None:
    with suppress(OSError, ValueError):
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("vocab_size")
        return stated if isinstance(stated, int) else None
    return None


def _shapes(folder: Path) -> Iterator[tuple[str, Shape]]:
    for path in sorted(folder.glob("*.safetensors")):
        yield from ((name, place.shape) for name, place in tensor_places(path).items())


def memory_of_stored_model(config: RunConfig, model: StoredModel, budget: MemoryBudget) -> list[MemoryUse]:
    """Peak memory of every process of a run, in pipeline order, as `memory_of_processes` counts it."""
    section, edges = config.parallelism, (0, *(config.model.boundaries or ()), len(model.blocks))
    segments = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    degree, schedule = section.pipeline_parallel_degree, section.pipeline_parallel_schedule
    placement = place(schedule, degree, len(segments), section.pipeline_parallel_shares)
    extra = section.pipeline_parallel_extra_microbatches
    held = peak_in_flight(action_lists(schedule, degree, config.microbatches, extra=extra), len(placement.stages))
    uses = []
    for process in range(degree):
        mine = [index for stage in placement.processes[process] for index in placement.stages[stage]]
        flying = sum(
            held[stage] * _saved_nbytes(config, model, segments[index])
            for stage in placement.processes[process]
            for index in placement.stages[stage]
        )
        working = max(_working_nbytes(config, model, segments, index) for index in mine)
        activations = int(budget.activation_factor * (flying + working))
        uses.append(_state(config, model, segments, mine, budget, activations))
    return uses


def needs_of_stored_model(config: RunConfig, model: StoredModel) -> list[SegmentNeeds]:
    """Needs of every segment, each by itself on a device with memory of its own, as `segment_needs` has those of our
    own models. Operations are those of its matrices, an attention over the whole width, and what is computed again."""
    edges = (0, *(config.model.boundaries or ()), len(model.blocks))
    segments = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    device = MemoryBudget(place="", free_nbytes=0, host_free_nbytes=0)
    needs = []
    for index in range(len(segments)):
        flying = in_flight_microbatches(index, len(segments), len(segments), config)
        activations = flying * _saved_nbytes(config, model, segments[index])
        activations += _working_nbytes(config, model, segments, index)
        use = _state(config, model, segments, [index], device, activations)
        needs.append(
            SegmentNeeds(
                flops_per_token=_flops_per_token(config, model, segments, index),
                memory_nbytes=use.total,
                host_nbytes=use.host - PROCESS_NBYTES,
            )
        )
    return needs


def state_of_stored_model(config: RunConfig, model: StoredModel) -> list[int]:
    """Bytes of what each segment saves: its trainable weights and their moments."""
    edges = (0, *(config.model.boundaries or ()), len(model.blocks))
    segments = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    device = MemoryBudget(place="", free_nbytes=0)
    uses = [_state(config, model, segments, [index], device, 0) for index in range(len(segments))]
    return [use.weights + use.optimiser for use in uses]


def _flops_per_token(config: RunConfig, model: StoredModel, segments: Sequence[range], index: int) -> float:
    """Forward and backward, experts of a mixture counted as if all were used: an upper bound, the same for all its
    segments. Frozen matrices have no gradient of their own."""
    lora, mode = config.lora, config.execution.checkpoint_activations
    in_blocks = [item for block in segments[index] for item in model.blocks[block].items() if _is_matrix(*item)]
    blocks = 2 * sum(math.prod(shape) for _, shape in in_blocks)
    attention = 4 * config.training.seq_len * model.width * len(segments[index])
    head = 2 * max((math.prod(shape) for shape in model.last.values()), default=0) if index == len(segments) - 1 else 0
    adapters = 2 * sum(_adapter_numel(name, shape, lora) for name, shape in in_blocks) if lora is not None else 0
    passes = 3 if lora is None else 2
    again = 0 if mode == "none" else blocks + attention + adapters
    return float(passes * (blocks + head) + 3 * (attention + adapters) + again)


def _state(
    config: RunConfig,
    model: StoredModel,
    segments: Sequence[range],
    mine: Sequence[int],
    budget: MemoryBudget,
    activations: int,
) -> MemoryUse:
    recipe, lora = config.planned_recipe, config.lora
    offloads = config.training.offload == "optimizer" and not budget.is_host
    in_blocks = [item for index in mine for block in segments[index] for item in model.blocks[block].items()]
    ends = [*(model.first.items() if 0 in mine else ()), *(_last(model, segments) if len(segments) - 1 in mine else ())]
    if lora is None:
        shapes = [shape for _, shape in (*in_blocks, *ends)]
        weights = gradients = recipe.itemsize * sum(map(math.prod, shapes))
        moments, frozen = sum(recipe.moments_nbytes(shape, math.prod(shape)) for shape in shapes), 0
    else:
        adapters = sum(_adapter_numel(name, shape, lora) for name, shape in in_blocks)
        weights = gradients = ITEM_NBYTES["float32"] * adapters
        moments = 2 * weights
        frozen = sum(math.ceil(_frozen_nbytes(config, name, shape)) for name, shape in in_blocks)
        frozen += recipe.itemsize * sum(math.prod(shape) for _, shape in ends)
    return MemoryUse(
        weights=weights,
        gradients=gradients,
        optimiser=0 if offloads else moments,
        activations=activations,
        frozen=frozen,
        overhead=0,
        tables=0,
        host=0 if budget.is_host else (moments if offloads else 0) + PROCESS_NBYTES,
    )


def _last(model: StoredModel, segments: Sequence[range]) -> Iterator[tuple[str, Shape]]:
    """What the last segment has after its blocks; a tied head is the embedding itself if there is one segment."""
    yield from (item for item in model.last.items() if len(segments) > 1 or item[0] not in model.first)


def _is_matrix(name: str, shape: Shape) -> bool:
    return len(shape) == 2 and name.endswith(".weight")


def _adapter_numel(name: str, shape: Shape, lora: LoraConfig) -> int:
    targets = lora.target_modules
    layer = name.removesuffix(".weight")
    if isinstance(targets, str):
        is_target = targets == "all-linear" or re.fullmatch(targets, layer) is not None
    else:
        is_target = any(layer == each or layer.endswith(f".{each}") for each in targets)
    return lora.r * sum(shape) if is_target and _is_matrix(name, shape) else 0


def _frozen_nbytes(config: RunConfig, name: str, shape: Shape) -> float:
    kind = config.model.quantize_base
    if kind is None or not _is_matrix(name, shape) or ".experts." in name:  # experts are merged to one tensor first
        return config.planned_recipe.itemsize * math.prod(shape)
    return math.prod(shape) * _QUANTISED_BITS[kind] / 8


def _tokens(config: RunConfig) -> int:
    return config.microbatch_size * config.training.seq_len


def _block_nbytes(config: RunConfig, block: Mapping[str, Shape], width: int) -> int:
    """Estimate of what autograd saves in a block: inputs and outputs of its matrices, and about four states."""
    recipe = config.planned_recipe
    itemsize = ITEM_NBYTES["bfloat16"] if recipe.uses_bf16 else recipe.itemsize
    matrices = [(name, shape) for name, shape in block.items() if _is_matrix(name, shape)]
    per_token = itemsize * sum(sum(shape) for _, shape in matrices) + 4 * width * recipe.itemsize
    lora = config.lora
    if lora is not None:  # the input of each adapter in float32, its mask, and its output of rank r
        adapted = [shape for name, shape in matrices if _adapter_numel(name, shape, lora)]
        wide = 4 if recipe.uses_bf16 else 0
        per_token += sum(wide * shape[-1] + 4 * lora.r for shape in adapted)
        per_token += sum(5 * shape[-1] for shape in adapted) if lora.lora_dropout else 0
    return _tokens(config) * per_token


def _saved_nbytes(config: RunConfig, model: StoredModel, blocks: range) -> int:
    """Activations of a micro-batch between its forward and its backward pass."""
    state = _tokens(config) * model.width * config.planned_recipe.itemsize
    match config.execution.checkpoint_activations:
        case "none":
            return sum(_block_nbytes(config, model.blocks[index], model.width) for index in blocks)
        case "block":
            return state * len(blocks)
    return state


def _working_nbytes(config: RunConfig, model: StoredModel, segments: Sequence[range], index: int) -> int:
    """Bytes beside saved activations while a segment computes."""
    recomputed = [_block_nbytes(config, model.blocks[block], model.width) for block in segments[index]]
    match config.execution.checkpoint_activations:
        case "none":
            working = 0
        case "block":
            working = max(recomputed)
        case _:
            working = sum(recomputed)
    if index < len(segments) - 1:
        return working
    logits = min(_tokens(config) * model.vocab_size, MAX_LOGITS)
    return working + logits * 3 * ITEM_NBYTES["float32"]
