"""PRESETS: model configurations by name, such as "llama-tiny", collected from the families in families/. The `tiny`
presets train on a laptop's CPU; change any field with `dataclasses.replace`."""

from thinpipe.config.families import FAMILIES
from thinpipe.config.model import ModelConfig

PRESETS: dict[str, ModelConfig] = {
    name: preset for config in FAMILIES.values() for name, preset in config.presets().items()
}
