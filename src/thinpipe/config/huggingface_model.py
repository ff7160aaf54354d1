"""Configuration of a model that is Hugging Face's own class: its config.json as it is, and where it is cut.

Unlike a family of ours (`config/families`) it describes no layers: transformers builds them from config.json. Imports
neither torch nor transformers; `models/hf/decoder.py` makes one from a folder.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from thinpipe.config.segments import refuse_wrong_boundaries, segments_between
from thinpipe.core.errors import UserError

HUGGINGFACE = "huggingface"
"""Family of these models in the manifest of a checkpoint."""
HUB_PREFIX = "hf:"
"""Of the source of a model on the Hugging Face hub: hf:NAME or hf:NAME@REVISION; any other source is a folder."""
QuantizedBase = Literal["nf4", "int8"]
"""How a frozen base can be kept."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters beside frozen weights, in the words of the library peft."""

    r: int = 16
    """Rank of an adapter."""
    lora_alpha: float = 32
    """An adapter's output is multiplied by lora_alpha / r."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the layers that get adapters, as peft matches them; all-linear: every linear layer in the blocks."""
    lora_dropout: float = 0.0
    """Dropout of an adapter's input."""
    use_rslora: bool = False
    """Whether to multiply by lora_alpha / sqrt(r) instead."""

    def __post_init__(self) -> None:
        if self.r < 1:
            raise UserError(f"lora.r must be at least 1, not {self.r}")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"lora.lora_dropout must be at least 0 and below 1, not {self.lora_dropout}")
        if not self.target_modules:
            raise UserError('lora.target_modules is empty: name layers, or write "all-linear"')


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModelConfig:
    """A decoder-only model of Hugging Face, cut into segments."""

    source: str
    """Folder with config.json and the model's safetensors files, or hf:NAME@COMMIT of the Hugging Face hub."""
    stored: dict[str, Any]
    """Content of config.json."""
    vocab_size: int
    dim: int
    """Width of the residual stream, and so of the state at a boundary."""
    n_layers: int
    lora: LoraConfig | None = None
    """Adapters that are trained while all other weights are frozen. None: all weights are trained."""
    quantize_base: QuantizedBase | None = None
    """How matrices of frozen blocks are kept (see `model.quantize_base`)."""
    max_seq_len: int | None = None
    """Maximum context length in tokens; None: the model has no limit."""
    is_tied: bool = False
    """Whether the base's head shares the embedding's weights."""
    unties: bool = False
    """Whether such a head becomes a copy, trained separately, in one segment too; in several it always does."""
    base_sha256: str = ""
    """In a checkpoint: hash of the base (`models/hf/base_statement.py`)."""
    boundaries: tuple[int, ...] = ()
    """Block indices at which the model is cut: (2, 4) makes the segments blocks 0-1, 2-3 and 4 to the end."""

    def __post_init__(self) -> None:
        refuse_wrong_boundaries(self.boundaries, self.n_layers)

    @property
    def family(self) -> str:
        return HUGGINGFACE

    @property
    def is_untied(self) -> bool:
        """Whether a head that the base ties to the embedding is a copy of its own."""
        return self.is_tied and (self.unties or len(self.segments) > 1)

    @property
    def uncut(self) -> "HuggingFaceModelConfig":
        """The same parameters in one segment."""
        return replace(self, boundaries=(), unties=self.is_untied)

    @property
    def state_width(self) -> int:
        return self.dim

    @property
    def in_subspace(self) -> bool:
        return False

    @property
    def segments_need_ids(self) -> bool:
        """Only the first segment looks up token ids, and only the last one needs labels."""
        return False

    @property
    def segments(self) -> tuple[range, ...]:
        """Block indices of each segment."""
        return segments_between(self.boundaries, self.n_layers)
