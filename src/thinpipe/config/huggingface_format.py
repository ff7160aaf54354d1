"""Description of a family's Hugging Face folders: keys of config.json, and names of stored tensors. Imports no torch.

A family fills in a `HuggingFaceFormat`; `models/hf` reads and writes folders by it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thinpipe.core.errors import UserError

HFConfig = Mapping[str, Any]
"""Parsed content of a config.json."""


@dataclass(frozen=True)
class ConfigKey:
    """Hugging Face key that corresponds to one field of a ModelConfig. Without a default, the key is required."""

    name: str
    kind: type[int] | type[float] | type[bool] = int
    default: float | bool | None = None

    def read(self, stored: HFConfig) -> Any:
        """Value of the key, of type `kind`. Raises UserError for a missing or unsuitable value."""
        value = stored.get(self.name)
        if value is None:
            value = self.default
        if value is None:
            raise UserError(f"{self.name} is missing: add it, with the value that the model was trained with")
        accepted: tuple[type, ...] = (int, float) if self.kind is float else (self.kind,)
        # bool is a subclass of int. Sizes below 1 are rejected here: later they would raise ZeroDivisionError.
        is_kind = isinstance(value, accepted) and isinstance(value, bool) == (self.kind is bool)
        if not is_kind or (self.kind is int and value < 1):
            kind = {int: "a whole number above 0", float: "a number", bool: "true or false"}[self.kind]
            raise UserError(f"{self.name} should be {kind}, not {value!r}")
        return self.kind(value)


@dataclass(frozen=True)
class FixedValue:
    """Supported values of a Hugging Face key that has no field in ModelConfig. The first one is Hugging Face's default
    and is written on export."""

    values: tuple[Any, ...]
    logits_depend: bool = True


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFormat:
    """Folders of one family. Their model_type is the name of the family."""

    architecture: str
    """Class name in transformers."""
    base: str
    """Prefix of tensor names that is missing in files saved without a head, and in some old files."""
    blocks: str
    """Prefix of the blocks after `base`. Names inside a block are thinpipe's."""
    transposed: tuple[str, ...] = ()
    """Suffixes of the names of matrices that are stored as inputs x outputs (Conv1D)."""
    keys: Mapping[str, ConfigKey]
    """Field of the configuration -> key of config.json."""
    fixed: Mapping[str, FixedValue] = field(default_factory=dict)
    read_rest: Callable[[HFConfig], dict[str, Any]] = lambda _stored: {}
    """Reads the fields that do not correspond to a single key; `write_rest` writes them. Raises UserError."""
    write_rest: Callable[[Any], dict[str, Any]] = lambda _config: {}
