"""Settings of the model of a run: a preset, a checkpoint or a Hugging Face model, with changes. Imports no torch."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from thinpipe.config.families import PRESETS
from thinpipe.config.huggingface_model import QuantizedBase
from thinpipe.config.model import ModelConfig, ProjectionConfig, SubspaceConfig
from thinpipe.core.errors import UserError

_WITHOUT_OVERRIDE = ("preset", "initial", "hf", "quantize_base", "subspace", "projection")
"""Settings that are not fields of a preset, or that are given as a whole."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model preset, and overrides of its fields."""

    preset: str = "llama-tiny"
    """Name of a model preset, for example llama-tiny, llama-150m, llama-8b, gpt2."""
    initial: Path | None = None
    """Checkpoint folder to start from instead of random weights (see `thinpipe import`). The checkpoint defines the
    whole model: no other model setting may be given."""
    hf: str | None = None
    """Hugging Face model to train on, any decoder that `thinpipe probe` accepts: a folder with config.json and
    safetensors files, or hf:NAME or hf:NAME@REVISION of the Hugging Face hub, of which every process downloads the
    files with its own layers. It defines the whole model: only boundaries and quantize_base may be given beside it.
    All weights are trained, unless there is a section [lora]."""
    quantize_base: QuantizedBase | None = None
    """LoRA only: how to keep the matrices of the frozen blocks, quantised by bitsandbytes when they are loaded, from
    weights in full precision. nf4: 4 bits with double quantisation (QLoRA, arXiv 2305.14314), 4.13 bits a weight. int8:
    8 bits (LLM.int8(), arXiv 2208.07339). None: not quantised."""
    dim: int | None = None
    """Width of the residual stream. None, here and below: the preset's value."""
    n_layers: int | None = None
    """Number of transformer blocks."""
    n_heads: int | None = None
    """Number of attention heads; must divide dim."""
    n_kv_heads: int | None = None
    """Llama only: number of key/value heads (grouped-query attention)."""
    hidden_dim: int | None = None
    """Llama only: width of the MLP."""
    max_seq_len: int | None = None
    """Maximum context length, in tokens."""
    dropout: float | None = None
    """GPT-2 only: dropout probability."""
    tied: bool | None = None
    """Whether the output head shares the embedding's weights. Only for dense models without boundaries."""
    boundaries: tuple[int, ...] | None = None
    """Block indices at which the model is cut into segments: 2 4 makes three segments (blocks 0-1, 2-3, 4 to the
    end)."""
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)
    projection: ProjectionConfig = field(default_factory=ProjectionConfig)

    def __post_init__(self) -> None:
        self._refuse_beside("initial", ())
        self._refuse_beside("hf", ("boundaries", "quantize_base"))
        if self.quantize_base is not None and self.hf is None:
            raise UserError("model.quantize_base is for Hugging Face models: set model.hf, or leave it out")

    def _refuse_beside(self, defining: str, allowed: tuple[str, ...]) -> None:
        """Raises UserError for a setting beside one that defines the whole model."""
        if getattr(self, defining) is None:
            return
        untouched = ModelSettings()
        for setting in dataclasses.fields(self):
            changed = getattr(self, setting.name) != getattr(untouched, setting.name)
            if changed and setting.name not in (defining, *allowed):
                raise UserError(f"model.{defining} defines the whole model: leave model.{setting.name} out")

    def resolve(self, vocab_size: int) -> ModelConfig:
        """The model configuration: the preset with these overrides and the vocabulary size of the data.

        Raises UserError for an unknown preset, for an override that the preset's family does not have, or if the model
        is one of Hugging Face (`models/hf/model_of_run.py`).
        """
        if self.hf is not None:
            raise UserError("model.hf is for `thinpipe train`, and not for this command yet")
        if self.preset not in PRESETS:
            raise UserError(f"model.preset {self.preset!r} is not one of: {', '.join(PRESETS)}")
        if self.subspace.fixed == "given":
            raise UserError(
                'model.subspace.fixed = "given" comes with `thinpipe import` only: write "signs" or "gaussian"'
            )
        if self.subspace.width is None and self.subspace != SubspaceConfig():
            raise UserError("model.subspace has settings but no width: set model.subspace.width, or leave them out")
        preset = PRESETS[self.preset]
        changes: dict[str, object] = {
            "vocab_size": vocab_size,
            "subspace": self.subspace,
            "projection": self.projection,
        }
        known = {field.name for field in dataclasses.fields(preset)}
        for change in dataclasses.fields(self):
            value = getattr(self, change.name)
            if value is None or change.name in _WITHOUT_OVERRIDE:
                continue
            if change.name not in known:
                raise UserError(f"model.{change.name} does not belong to {self.preset}: leave it out")
            changes[change.name] = value
        return dataclasses.replace(preset, **changes)  # type: ignore[arg-type]


def without_places(settings: ModelSettings) -> ModelSettings:
    """The settings without where the first weights lie, which is for machines to choose that compare their hashes."""
    initial, hf = settings.initial, settings.hf
    return dataclasses.replace(settings, initial=initial and Path(), hf=hf and "base")
