"""What a pipeline and the training engine need of a model and of its segments.

Two kinds of models implement it: ours (`models/model.py`), whose families are described in `config/families`, and
Hugging Face's own classes (`models/hf/decoder.py`). Who wants to train another kind implements this file.

What must hold, beyond the types: a segment's output depends on the token ids, on its state and on the dropout seed
alone, and not on which other segments its process has; so a pipeline of any number of processes has the bits of one.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.model import ExecutionConfig, ModelConfig
from thinpipe.core.errors import UserError
from thinpipe.models.model import build
from thinpipe.subspace import DenseSpace, Subspace
from thinpipe.subspace.space import OnGradient


class PipelineModelConfig(Protocol):
    """Configuration of a model: an immutable dataclass, which the manifest of a checkpoint keeps."""

    @property
    def family(self) -> str:
        """Name of the kind of model in a checkpoint's manifest."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def state_width(self) -> int:
        """Numbers per token in the state that crosses a boundary."""
        ...

    @property
    def in_subspace(self) -> bool:
        """Whether the state is coordinates in a subspace, whose basis moves."""
        ...

    @property
    def segments_need_ids(self) -> bool:
        """Whether segments after the first need token ids, beside the labels of the last one. Where they do not,
        `ids_BT` is 0 in these segments in a pipeline, and must not matter."""
        ...

    @property
    def segments(self) -> tuple[range, ...]:
        """Block indices of each segment."""
        ...


class PipelineSegment(Protocol):
    """The part of a model between two boundaries; an `nn.Module`.

    Built without memory for its weights, until `materialise`. Parameters are named as in the whole model, `first...`,
    `blocks.7...` or `last...`: the parts before the second point are the layers of checkpoints.
    """

    blocks: nn.ModuleDict
    """Its blocks by their index in the whole model."""
    on_gradient: OnGradient | None
    """Callback for the gradient at the segment's input; only models in a subspace need it."""

    @property
    def space(self) -> DenseSpace | Subspace:
        """The space of the states at the segment's boundaries."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether the segment has the output head: then its output is logits or losses."""
        ...

    def materialise(self, *, seed: int, device: torch.device, dtype: torch.dtype) -> Self:
        """Allocates this segment's parameters and buffers, and no others, and gives them their first values: drawn from
        the seed, or read from files."""
        ...

    def release(self) -> None:
        """Frees the weights. The segment cannot be used after that."""
        ...

    def __call__(
        self,
        ids_BT: Tensor,
        state: Tensor | None = None,
        *,
        dropout_seed: int | None = None,
        targets_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
    ) -> Tensor:
        """State for the next segment; from the last segment logits or, with `targets_BT`, the cross-entropy of every
        token in one row.

        `state`: output of the previous segment, None for the first. `dropout_seed`: seed of this pass and segment.
        `position_ids_BT`: positions that begin again with each of several texts in a row, which must not see each
        other; passed only to models that `refuse_packing` lets pass.
        """
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def modules(self) -> Iterator[nn.Module]: ...


class PipelineModel(Protocol):
    """All segments of a model; those of other processes have no memory."""

    @property
    def space(self) -> DenseSpace | Subspace: ...

    @property
    def config(self) -> PipelineModelConfig: ...

    @property
    def segments(self) -> Sequence[PipelineSegment]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all segments in layer order: the order of sums over parameters in every process."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def train(self, mode: bool = True) -> Self: ...

    def eval(self) -> Self: ...

    def set_execution(self, execution: ExecutionConfig, *, autocast_bf16: bool = False) -> None:
        """Sets how all segments are executed, after those of this process are materialised."""
        ...


def build_model(config: PipelineModelConfig) -> PipelineModel:
    """The model of a configuration of either kind, without memory for its weights. Raises UserError for a model of
    Hugging Face whose segments do not compute what the whole model computes."""
    if isinstance(config, HuggingFaceModelConfig):
        from thinpipe.models.hf.decoder import HuggingFaceModel  # transformers takes seconds to import
        from thinpipe.models.hf.probe_cache import require_probed

        require_probed(config)
        return HuggingFaceModel(config)
    assert isinstance(config, ModelConfig)
    return build(config)


def refuse_packing(config: PipelineModelConfig) -> None:
    """Raises UserError unless several chats in a row are computed as each would be alone. Shown by a probe for models
    of Hugging Face; the attention of our own families sees everything before it in its row."""
    if not isinstance(config, HuggingFaceModelConfig):
        raise UserError(
            f"training.packing: the attention of {config.family} does not see where a chat begins, so one chat would "
            "read another: leave training.packing out"
        )
    from thinpipe.models.hf.probe_cache import probed

    result = probed(config.stored)
    if not result.works("packing"):
        detail = next((check.detail for check in result.checks if check.name == "packing"), result.refusal)
        raise UserError(f"training.packing does not work with {result.model_type}: {detail}. Leave it out")


def trainable_parameters(*parts: PipelineModel | PipelineSegment) -> dict[str, nn.Parameter]:
    """Parameters that a run updates and saves, in layer order; frozen ones are not among them."""
    return {name: each for part in parts for name, each in part.named_parameters() if each.requires_grad}


def base_hashes(segments: Sequence[PipelineSegment]) -> set[str]:
    """Hashes of the tensors that these segments have read from a base; none of those drawn from a seed."""
    return {value for segment in segments for value in getattr(segment, "base_hashes", {}).values()}
