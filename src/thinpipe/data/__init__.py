"""Data pipeline: text sources, tokenizer, token shards, batches of token ids with exact resume. Imports no torch."""

from thinpipe.config.data import TokenizeConfig
from thinpipe.core.errors import DataError
from thinpipe.data.chat.encoding import ChatCounts, ShowChat
from thinpipe.data.chat.held_out import HeldOutChat, held_out_chats
from thinpipe.data.dataset import (
    Batch,
    Batches,
    Cursor,
    EvenlySpacedBatches,
    TokenSequence,
    Windows,
    sequential_batches,
)
from thinpipe.data.manifest import Manifest, Vocabulary
from thinpipe.data.prepare import Prepared, prepare
from thinpipe.data.progress import Progress, no_progress, progress_bar
from thinpipe.data.shards import ShardWriter, Tokens, has_tokens
from thinpipe.data.sources import Source, open_sources
from thinpipe.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Batches",
    "ChatCounts",
    "Cursor",
    "DataError",
    "EvenlySpacedBatches",
    "HeldOutChat",
    "Manifest",
    "Prepared",
    "Progress",
    "ShardWriter",
    "ShowChat",
    "Source",
    "TokenSequence",
    "TokenizeConfig",
    "Tokenizer",
    "Tokens",
    "Vocabulary",
    "Windows",
    "has_tokens",
    "held_out_chats",
    "no_progress",
    "open_sources",
    "prepare",
    "progress_bar",
    "sequential_batches",
]
