"""Fixtures of runs that train a Hugging Face model."""

from tests.huggingface.run_files import base_of, tokenizer, tune_tokens  # noqa: F401  fixtures
