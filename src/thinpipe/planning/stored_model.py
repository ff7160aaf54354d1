"""Shapes of a Hugging Face model that is to be trained as it is: from the headers of its files, in a folder or on the
Hugging Face hub, or, where only its config.json is known, from transformers (`models/hf/base_shapes.py`). Imports no
torch or transformers.

`stored_costs.py` counts memory and work from them.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.model import ModelConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.segments import refuse_wrong_boundaries, segments_between
from thinpipe.core.errors import UserError
from thinpipe.core.extras import require_extra
from thinpipe.core.safetensors_header import ITEM_BITS, tensor_places
from thinpipe.models.hf.config import CONFIG
from thinpipe.models.hf.model_hub import HubModel

Shape = tuple[int, ...]
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")
_TABLE = re.compile(r"(?:^|[._])(?:wte|wpe|\w*emb\w*)\.")
_PUBLISHED_NBYTES = 2
"""Bytes of a number where no file says it: published weights are in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """Shapes of the tensors of a base by name: those of each block, and those before and after the blocks."""

    blocks: tuple[Mapping[str, Shape], ...] = field(hash=False)
    first: Mapping[str, Shape] = field(hash=False)
    last: Mapping[str, Shape] = field(hash=False)
    """With the embedding once more if the head is tied to it."""
    vocab_size: int
    attention_width: int
    """Numbers of the queries of all heads."""
    active_experts: float = 1.0
    """Share of the experts of a mixture that compute a token."""
    item_nbytes: float = _PUBLISHED_NBYTES
    """Bytes of a stored number."""
    boundaries: tuple[int, ...] = ()

    in_subspace: ClassVar[bool] = False
    has_projection: ClassVar[bool] = False
    segments_need_ids: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_wrong_boundaries(self.boundaries, self.n_layers)

    @classmethod
    def of_shapes(
        cls, shapes: Iterable[tuple[str, Shape]], stated: Mapping[str, Any], *, item_nbytes: float | None = None
    ) -> "StoredModel":
        """`stated`: content of config.json. `item_nbytes`: None: as config.json says. Raises UserError."""
        blocks: dict[int, dict[str, Shape]] = {}
        first, last = dict[str, Shape](), dict[str, Shape]()
        for name, shape in shapes:
            index = _BLOCK.search(name)
            where = first if _TABLE.search(name) else last
            (blocks.setdefault(int(index[1]), {}) if index else where)[name] = shape
        if not blocks or not first:
            raise UserError("these weights have no blocks, or no embedding: is it a decoder of Hugging Face?")
        vocabulary = _vocabulary(stated, first)
        if not any(shape[0] == vocabulary for shape in last.values()):  # a tied head: the last has a copy
            last |= {name: shape for name, shape in first.items() if shape[0] == vocabulary}
        return cls(
            blocks=tuple(blocks[index] for index in sorted(blocks)),
            first=first,
            last=last,
            vocab_size=vocabulary,
            attention_width=_attention_width(stated) or _width(first),
            active_experts=_active_experts(stated),
            item_nbytes=_stated_nbytes(stated) if item_nbytes is None else item_nbytes,
        )

    @classmethod
    def of_run(cls, model: HuggingFaceModelConfig, shapes: Iterable[tuple[str, Shape]]) -> "StoredModel":
        """The model of a run, with its boundaries. `shapes`: of its base. Raises UserError."""
        return replace(cls.of_shapes(shapes, model.stored), boundaries=tuple(model.boundaries))

    @classmethod
    def read(cls, folder: Path) -> "StoredModel":
        """Reads the headers of a folder's safetensors files, and its config.json. Raises UserError."""
        listed = [*_headers(folder)]
        if not listed:
            raise UserError(f"{folder} has no safetensors files")
        return cls._of_headers(listed, read_config(folder))

    @classmethod
    def read_hub(cls, hub: HubModel) -> "StoredModel":
        """As `read`, of a model on the Hugging Face hub; no weights are downloaded. Raises UserError."""
        require_extra("huggingface_hub", extra="tune", feature=f"model.hf = {str(hub)!r}")
        config = hub.fetch(CONFIG)
        if config is None:
            raise UserError(f"{hub} has no {CONFIG}")
        pinned = HubModel(hub.name, config.parent.name)
        return cls._of_headers([*pinned.shapes()], read_config(config.parent))

    @classmethod
    def _of_headers(cls, listed: list[tuple[str, str, Shape]], stated: Mapping[str, Any]) -> "StoredModel":
        """`listed`: name, type and shape of every tensor; `stated`: content of config.json."""
        count = sum(math.prod(shape) for _, _, shape in listed)
        nbytes = sum(math.prod(shape) * ITEM_BITS.get(dtype, 8 * _PUBLISHED_NBYTES) / 8 for _, dtype, shape in listed)
        shapes = ((name, shape) for name, _, shape in listed)
        return cls.of_shapes(shapes, stated, item_nbytes=nbytes / max(1, count))

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return _width(self.first)

    @property
    def state_width(self) -> int:
        return self.dim

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @property
    def segments(self) -> tuple[range, ...]:
        """Block indices of each segment."""
        return segments_between(self.boundaries, self.n_layers)


PlannedModel = ModelConfig | StoredModel


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def stored_model_of(config: RunConfig) -> StoredModel | None:
    """The base of a run, cut as the run cuts it; None if the run has none, or if its folder has no weights. Raises
    UserError, also for a model on the Hugging Face hub of which neither files are here nor headers can be read."""
    source = config.model.hf
    hub = None if source is None else HubModel.of(source)
    if hub is not None:
        return cut(StoredModel.read_hub(hub), config)
    if source is None or not has_weights(Path(source)):
        return None
    return cut(StoredModel.read(Path(source)), config)


def cut(model: StoredModel, config: RunConfig) -> StoredModel:
    """The model with the boundaries of a run. Raises UserError."""
    return replace(model, boundaries=tuple(config.model.boundaries or ()))


def read_config(folder: Path) -> dict[str, Any]:
    """Content of config.json; empty if it cannot be read, which is said elsewhere."""
    with suppress(OSError, ValueError):
        stated = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if isinstance(stated, dict):
            return stated
    return {}


def _width(first: Mapping[str, Shape]) -> int:
    return min(shape[-1] for shape in first.values() if len(shape) == 2)


def _number(stated: Mapping[str, Any], *names: str) -> int | None:
    """The first of these settings that is a number above 0."""
    found = (stated.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _vocabulary(stated: Mapping[str, Any], first: Mapping[str, Shape]) -> int:
    """As config.json says; else rows of the largest embedding."""
    return _number(stated, "vocab_size") or max(shape[0] for shape in first.values())


def _attention_width(stated: Mapping[str, Any]) -> int | None:
    heads, each = _number(stated, "num_attention_heads", "n_head"), _number(stated, "head_dim")
    return heads * each if heads and each else None


def _active_experts(stated: Mapping[str, Any]) -> float:
    active = _number(stated, "num_experts_per_tok", "num_experts_per_token")
    count = _number(stated, "num_local_experts", "num_experts", "n_routed_experts")
    return min(1.0, active / count) if active and count else 1.0


def _stated_nbytes(stated: Mapping[str, Any]) -> float:
    dtype = stated.get("dtype") or stated.get("torch_dtype")
    return {"float64": 8, "float32": 4}.get(str(dtype), _PUBLISHED_NBYTES)


def _headers(folder: Path) -> Iterator[tuple[str, str, Shape]]:
    """Name, type and shape of every tensor."""
    for path in sorted(folder.glob("*.safetensors")):
        yield from ((name, place.dtype, place.shape) for name, place in tensor_places(path).items())
