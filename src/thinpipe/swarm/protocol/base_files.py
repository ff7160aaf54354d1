"""Names under which a hub serves the base of a run on a Hugging Face model (`read_file`)."""

_FOLDER = "base"
STATEMENT_FILE = f"{_FOLDER}/base.json"
"""What the base consists of: `models.hf.base_statement.BaseStatement` as JSON."""


def tensor_file(sha256: str) -> str:
    """Name of the content of a tensor, by its hash."""
    return f"{_FOLDER}/{sha256}"
