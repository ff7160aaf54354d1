"""The model of a hub's run: what its segments need and save, by which the hub assigns them, and the base of a Hugging
Face model."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thinpipe.checkpoint import Checkpoint
from thinpipe.checkpoint.state import layers_by_segment, pipeline_config_of, refuse_other_base, refuse_other_model
from thinpipe.checkpoint.storage import layer_file
from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.model import ModelConfig
from thinpipe.config.parameter_shapes import attention_heads
from thinpipe.config.run import RunConfig
from thinpipe.models.model import make_space
from thinpipe.models.protocol import PipelineModel, build_model
from thinpipe.pipeline.boundary_methods import boundary_method
from thinpipe.planning.messages import message_sizes
from thinpipe.planning.partition import SegmentNeeds, Traffic
from thinpipe.planning.segment_costs import needs_by_kernel, segment_costs, shared_nbytes
from thinpipe.planning.stored_model import PlannedModel, StoredModel
from thinpipe.subspace import DenseSpace, Subspace
from thinpipe.training.model_choice import choose_model

if TYPE_CHECKING:
    from thinpipe.swarm.hub.served_base import ServedBase


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """A model, without memory for its weights, and what the hub has to know of it."""

    config: ModelConfig | HuggingFaceModelConfig
    built: PipelineModel
    heads: tuple[int, int, int]
    """Number of query heads and of key heads in a block, and the width of a head."""
    needs: list[SegmentNeeds]
    state_nbytes: list[int]
    """Bytes that each segment saves, without codec state."""
    shared_nbytes: int
    """Bytes that a machine holds once for all its segments."""
    traffic: Traffic
    files_of_segments: list[list[str]]
    """Checkpoint files of the layers of each segment."""

    def make_space(self) -> DenseSpace | Subspace:
        """A new space of the states at boundaries, into which that of a checkpoint can be read."""
        return make_space(self.config) if isinstance(self.config, ModelConfig) else DenseSpace(self.config.dim)


def open_base(config: RunConfig, vocab_size: int, newest: Checkpoint | None) -> "ServedBase | None":
    """The base of a run on a Hugging Face model; None of another run. Raises UserError if the model cannot be trained
    in segments, does not fit the tokens, or is not the one of the newest checkpoint."""
    if config.model.hf is None:
        return None
    model = choose_model(config, vocab_size, None, reads_tokens=True)
    assert isinstance(model, HuggingFaceModelConfig)
    from thinpipe.swarm.hub.served_base import ServedBase  # transformers takes seconds to import

    build_model(model)  # the probe, before the base is read
    if newest is not None:
        refuse_other_model(model, newest)
    base = ServedBase(model, config.job.dump_folder / "hub" / "base.json")
    if newest is not None:
        refuse_other_base(model.source, base.statement.base_sha256, newest)
    return base


def describe_model(newest: Checkpoint, config: RunConfig, base: "ServedBase | None", *, chats: bool) -> RunModel:
    """The model of the newest checkpoint. `chats`: token ids have flags."""
    model = pipeline_config_of(newest)
    built = build_model(model)
    boundary = replace(config, boundary=replace(config.boundary, store=None))
    method = boundary_method(model, boundary, chats=chats) if model.boundaries else None
    files = [[layer_file(layer) for layer in layers] for layers in layers_by_segment(built, method)]
    if isinstance(model, ModelConfig):
        planned: PlannedModel = model
        heads = attention_heads(model)
    else:
        from thinpipe.models.hf.pretrained_config import attention_heads as heads_of_published

        assert base is not None
        shapes = ((tensor.name, tuple(tensor.shape)) for tensor in base.statement.tensors)
        planned, heads = StoredModel.of_run(model, shapes), heads_of_published(model)
    return RunModel(
        config=model,
        built=built,
        heads=heads,
        needs=needs_by_kernel(planned, config),
        state_nbytes=[cost.state_nbytes for cost in segment_costs(planned, config)],
        shared_nbytes=shared_nbytes(planned, config),
        traffic=message_sizes(planned, config, chats=chats).traffic(config),
        files_of_segments=files,
    )
