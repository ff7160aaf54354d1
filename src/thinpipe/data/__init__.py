"""From text to batches of token ids with exact resume: sources, tokenizer, packed shards, samples. No torch here."""

from thinpipe.data.config import PrepareConfig
from thinpipe.data.errors import DataError
from thinpipe.data.manifest import Manifest, Vocabulary
from thinpipe.data.prepare import Prepared, prepare
from thinpipe.data.progress import Progress, progress_bar, quiet
from thinpipe.data.samples import Batch, Batches, Cursor, SpreadBatches, TokenSequence, Windows, sequential_batches
from thinpipe.data.shards import ShardWriter, Tokens, has_tokens
from thinpipe.data.sources import Source, open_sources
from thinpipe.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Batches",
    "Cursor",
    "DataError",
    "Manifest",
    "PrepareConfig",
    "Prepared",
    "Progress",
    "ShardWriter",
    "Source",
    "SpreadBatches",
    "TokenSequence",
    "Tokenizer",
    "Tokens",
    "Vocabulary",
    "Windows",
    "has_tokens",
    "open_sources",
    "prepare",
    "progress_bar",
    "quiet",
    "sequential_batches",
]
