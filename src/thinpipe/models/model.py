"""The model as torch modules: a Model has all layers, a Segment those between two boundaries (cuts at which the model
may be split over machines).

Layers are `first` (embedding), `blocks`, and `last` (norm and head). The output of a segment, its state, is what
crosses the boundary: D numbers per token, or fewer with a subspace or a boundary projection.
Every segment computes its input stream from the token ids and the previous segment's state, in the same way
whether segments share a process or not. `build` makes a model on the meta device, without allocating memory;
`init_weights.materialise` allocates and initialises a model or single segments.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from thinpipe.config.model import ExecutionConfig, ModelConfig
from thinpipe.config.parameter_shapes import named_parameters
from thinpipe.core.seeds import derive_seed
from thinpipe.models.boundary_projection import BoundaryProjection
from thinpipe.models.decoder import Attention, Dropout, build_layers
from thinpipe.models.init_weights import materialise
from thinpipe.models.kv_cache import KVCache
from thinpipe.subspace import (
    FIXED_TABLES,
    DenseSpace,
    DenseStream,
    FixedTable,
    FreeSpace,
    Stream,
    Subspace,
    coordinates_of,
)
from thinpipe.subspace.parameter_tags import is_orthonormal
from thinpipe.subspace.space import OnGradient


class Segment(nn.Module):
    """Consecutive blocks; the first segment also has `first` (embedding), the last one `last` (norm and head).

    Parameter names are those of the whole model (`blocks.7.mlp.up_proj.weight`) in every process.
    """

    def __init__(
        self,
        config: ModelConfig,
        space: DenseSpace | Subspace,
        *,
        first: nn.Module | None,
        blocks: dict[int, nn.Module],
        last: nn.Module | None,
        projection: BoundaryProjection | None = None,
    ) -> None:
        super().__init__()
        self.config, self.space = config, space
        by_name = nn.ModuleDict({str(index): block for index, block in blocks.items()})
        self.first, self.blocks, self.last = first, by_name, last  # in layer order, as in the whole model
        self.projections = nn.ModuleDict({} if projection is None else {str(projection.segment): projection})
        self.execution, self.autocast_bf16 = ExecutionConfig(), False
        self.on_gradient: OnGradient | None = None
        """Callback that receives the D-wide gradient at the input of this segment in every backward pass. Not called in
        a segment with a boundary projection."""

    def forward(
        self,
        ids_BT: Tensor,
        state: Tensor | None = None,
        cache: KVCache | None = None,
        dropout_seed: int | None = None,
        targets_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
    ) -> Tensor:
        """State for the next segment; from the last segment logits or, with `targets_BT`, the cross-entropy of every
        token in one row, without all logits at once.

        `state`: output of the previous segment; None for the first segment. `cache`: KV cache of the tokens before
        `ids_BT`, which is extended. `dropout_seed`: seed of this pass and segment, needed if dropout is on. Raises
        ValueError if the seed is missing, if the tokens exceed max_seq_len or the cache, or for `position_ids_BT`: the
        attention here does not keep several texts of a row apart.
        """
        if position_ids_BT is not None:
            raise ValueError("several texts in a row are not for this model")
        start = self._first_position(ids_BT.shape[1], cache)
        device, caches = ids_BT.device.type, self.execution.checkpoint_activations == "none"
        # A checkpointed block keeps no copies of its weights: autocast makes them again when it is computed again.
        with torch.autocast(device, torch.bfloat16, enabled=self.autocast_bf16, cache_enabled=caches):
            if self.execution.checkpoint_activations == "segment" and cache is None:
                stream = _checkpointed(self._run_blocks, ids_BT, state, None, start, dropout_seed)
            else:
                stream = self._run_blocks(ids_BT, state, cache, start, dropout_seed)
            out: Tensor = stream.state if self.last is None else self.last(stream, targets_BT)
        return out

    def _run_blocks(
        self, ids_BT: Tensor, state: Tensor | None, cache: KVCache | None, start: int, dropout_seed: int | None
    ) -> Stream:
        """The stream after the last block; its state is what crosses the boundary, or `last` reads the stream."""
        if self.first is not None:
            state = self.first(ids_BT, start, dropout_seed)
        elif state is None:
            raise ValueError("only the first segment starts from token ids alone")
        projection, prior_BTD = self.projection, None
        if projection is None:
            stream = self.space.open(ids_BT, state, self.on_gradient, start)
        else:
            previous_BP = None if cache is None else cache.previous_ids(projection.segment, ids_BT, projection.lookback)
            stream, prior_BTD = projection.open(ids_BT, state, previous_BP)
        for index, block in self.blocks.items():
            layer_cache = None if cache is None else cache.layer(int(index))
            seed = None if dropout_seed is None else derive_seed(dropout_seed, int(index))
            if self.execution.checkpoint_activations == "block" and cache is None:
                # torch takes the device whose autocast it restores from the tensor arguments, and does not look inside
                # a Stream; hence the argument `stream.state`.
                stream = _checkpointed(_run_block, stream.state, block, stream, seed)
            else:
                stream = block(stream, layer_cache, seed)
        if self.last is None and projection is not None:
            return DenseStream(projection.close(stream, prior_BTD))
        return stream

    @property
    def is_last(self) -> bool:
        """Whether the segment has the output head."""
        return self.last is not None

    def materialise(self, *, seed: int, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Allocates the segment and draws its weights from the seed."""
        materialise(self, seed=seed, device=device, dtype=dtype)
        return self

    def release(self) -> None:
        """Frees the weights. The segment cannot be used after that."""
        self.to("meta")

    @property
    def projection(self) -> BoundaryProjection | None:
        projection = next(iter(self.projections.values()), None)
        assert projection is None or isinstance(projection, BoundaryProjection)
        return projection

    def _first_position(self, tokens: int, cache: KVCache | None) -> int:
        """Position of the first token. Read from this segment's own first block in the KV cache, because segments that
        share a cache extend it one after the other."""
        start = 0 if cache is None else cache.layer(int(next(iter(self.blocks)))).length
        end = start + tokens
        if end > self.config.max_seq_len:
            raise ValueError(f"{end} tokens do not fit into max_seq_len {self.config.max_seq_len}")
        if cache is not None and end > cache.max_length:
            raise ValueError(
                f"{end} tokens do not fit into a KV cache of {cache.max_length}: "
                f"make one of up to max_seq_len {self.config.max_seq_len}"
            )
        return start


def _run_block(_state: Tensor, block: nn.Module, stream: Stream, dropout_seed: int | None) -> Stream:
    out: Stream = block(stream, None, dropout_seed)
    return out


def _checkpointed(run: Callable[..., Stream], *arguments: Any) -> Stream:
    """Activation checkpointing: keeps the arguments of `run` and calls it again in the backward pass."""
    out: Stream = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out


class Model(nn.Module):
    """All layers of a model. `segments` share modules and parameters with it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.space = make_space(config)
        free = FreeSpace(self.space) if isinstance(self.space, Subspace) else self.space
        spaces = [self.space if index < config.first_free_block else free for index in range(config.n_layers)]
        first, blocks, last = build_layers(config, self.space, spaces)
        # Registered in layer order: it is the order of parameters(), and thus of sums over parameters (bit-exactness).
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        has_projections = config.has_projection
        self.projections = nn.ModuleList(
            [BoundaryProjection(config, index) for index in range(len(config.segments))] if has_projections else []
        )
        self.segments = tuple(
            Segment(
                config,
                spaces[indices.start],
                first=self.first if indices.start == 0 else None,
                blocks={index: self.blocks[index] for index in indices},
                last=self.last if indices.stop == config.n_layers else None,
                projection=self.projections[index] if has_projections else None,  # type: ignore[arg-type]
            )
            for index, indices in enumerate(config.segments)
        )

    def forward(
        self,
        ids_BT: Tensor,
        cache: KVCache | None = None,
        dropout_seed: int | None = None,
        targets_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits of every token or, with `targets_BT`, the cross-entropy of every token in one row. `cache`: KV cache
        of the tokens before `ids_BT`, which is extended. `dropout_seed`: seed of this pass, needed if dropout is
        on."""
        state: Tensor | None = None
        for segment in self.segments:
            state = segment(ids_BT, state, cache, dropout_seed, targets_BT)
        assert state is not None
        return state

    def set_execution(self, execution: ExecutionConfig, *, autocast_bf16: bool = False) -> None:
        """Sets the execution options of all segments, chooses the attention kernels for the device of the weights, and
        compiles the blocks if asked to. `autocast_bf16`: compute matrix products in bfloat16; parameters and boundary
        states keep their data type."""
        for segment in self.segments:
            segment.execution, segment.autocast_bf16 = execution, autocast_bf16
        for attention in self.blocks.modules():
            if isinstance(attention, Attention) and not next(attention.parameters()).is_meta:
                attention.choose_kernel(autocast_bf16=autocast_bf16)
        if execution.compile:
            for each in self.blocks.modules():
                if (
                    isinstance(each, Dropout) and each.rate > 0
                ):  # a compiled mask would be compiled again for every seed
                    each.forward = torch.compiler.disable(each.forward)  # type: ignore[method-assign]
            for block in self.blocks:
                block.compile()


def build(config: ModelConfig) -> Model:
    """The model on the meta device: shapes and names, without allocated memory."""
    with torch.device("meta"), _SkipInit():
        model = Model(config)
    _check_parameter_shapes(model)
    return model


def _check_parameter_shapes(model: Model) -> None:
    """Raises ValueError, with the first difference, unless the model has exactly the parameters described by
    `config.parameter_shapes`: in the same order, with the same names, shapes and tags."""
    described = [
        (name, each.shape, each.coordinates_axis, each.is_orthonormal)
        for name, each in named_parameters(model.config).items()
    ]
    built = []
    for name, parameter in model.named_parameters():
        coordinates = coordinates_of(parameter)
        axis = None if coordinates is None else coordinates.axis
        built.append((name, tuple(parameter.shape), axis, is_orthonormal(parameter)))
    for module, shapes in zip_longest(built, described):
        if module != shapes:
            raise ValueError(
                f"modules of {model.config.family} differ from config.parameter_shapes: (name, shape, axis of "
                f"coordinates, orthonormal) is {module} in the modules and {shapes} in the description"
            )


class _SkipInit(TorchFunctionMode):
    """Skips torch.nn.init: on the meta device it has no effect but to import torch's compiler, which is slow."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in (kwargs or {}) else args[0]
        return function(*args, **(kwargs or {}))


def make_space(config: ModelConfig) -> DenseSpace | Subspace:
    """The space of the residual stream: all of R^D, or a subspace with its frozen tables, which hold a D-wide vector
    for each token id (and position)."""
    subspace = config.subspace
    if subspace.width is None:
        return DenseSpace(config.dim, config.projection.embedding_rank)

    def table(rows: int, word: str) -> FixedTable:
        seed = derive_seed(subspace.seed, word)
        return FIXED_TABLES[subspace.fixed](rows, config.dim, std=subspace.fixed_std, seed=seed)

    options: dict[str, Any] = {"tokens": table(config.vocab_size, "tokens")}
    if config.has_position_table:
        options["positions"] = table(config.max_seq_len, "positions")
    return Subspace(config.dim, subspace.width, seed=subspace.seed, **options)
