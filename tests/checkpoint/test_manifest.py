"""What a manifest says of a model, wherever its settings came from."""

import tomllib

from thinpipe.checkpoint import new_manifest
from thinpipe.config.run import ModelSettings
from thinpipe.config.toml import dump_toml, from_table
from thinpipe.models import build


def test_settings_read_from_a_file_describe_the_same_model():
    """A hub compares the two: settings that are left out in a file are the defaults, None among them."""
    made = ModelSettings(preset="llama-tiny", dim=32, n_heads=2, n_kv_heads=1, hidden_dim=64)
    read = from_table(tomllib.loads(dump_toml(made)), ModelSettings, where="a test")
    assert new_manifest(build(read.resolve(64))).model == new_manifest(build(made.resolve(64))).model
