"""The small run of the training tests."""

from tests.train.conftest import programs, run_config, tokens

__all__ = ["programs", "run_config", "tokens"]
