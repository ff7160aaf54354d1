"""Tokenizers in Hugging Face's file format: trained here (byte-level BPE) or loaded.

Documents are always encoded as plain text: special tokens in a document are encoded as their characters, and nothing is
added, truncated or padded, whatever the loaded files specify.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import tokenizers

from thinpipe.core.errors import DataError
from thinpipe.core.files import write_atomically
from thinpipe.data.chunking import cut_into_pieces, group_by_size
from thinpipe.data.manifest import Vocabulary

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # 256 bytes and end-of-text
ENCODE_CHARS = 2**22
"""Characters of text encoded in one call: enough to keep all cores busy."""

_MAIN, _CONFIG, _SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_COPIED_FILES = (_CONFIG, _SPECIAL, "chat_template.jinja")
TOKENIZER_FILES = (_MAIN, *_COPIED_FILES)


class Tokenizer:
    """Encodes text as token ids and decodes them. Keeps the content of its files, so that saving a loaded tokenizer
    copies it byte for byte. Raises DataError if the end-of-text token does not exist."""

    def __init__(self, files: Mapping[str, bytes], end_of_text: str | None = None) -> None:
        content = json.loads(files[_MAIN])
        self._backend = tokenizers.Tokenizer.from_buffer(files[_MAIN])
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # special tokens in a text are encoded as their characters
        self.end_of_text = end_of_text or _end_of_text(files.get(_CONFIG)) or END_OF_TEXT
        end_of_text_id = self._backend.token_to_id(self.end_of_text)
        if end_of_text_id is None:
            special = ", ".join(token["content"] for token in content.get("added_tokens", []))
            raise DataError(
                f"the tokenizer has no token '{self.end_of_text}' to end a document with; set end_of_text to one of: "
                f"{special}"
            )
        self._files = {**_config_files(self.end_of_text), **files}
        self.vocabulary = Vocabulary(
            # Not the number of tokens: ids may have gaps.
            size=max(self._backend.get_vocab(with_added_tokens=True).values()) + 1,
            end_of_text_id=end_of_text_id,
            tokenizer_sha256=_content_sha256(content, self.end_of_text),
        )

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Self:
        """Trains byte-level BPE. Deterministic; encoding is lossless for every text. Raises DataError if the texts are
        too short for `vocab_size`."""
        if vocab_size < MIN_VOCAB_SIZE:
            raise DataError(
                f"vocab_size must be at least {MIN_VOCAB_SIZE} (all bytes, and {END_OF_TEXT}), not {vocab_size}"
            )
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator((piece for text in texts for piece in cut_into_pieces(text)), trainer)
        if (size := backend.get_vocab_size()) < vocab_size:
            raise DataError(f"the text is too short for vocab_size {vocab_size:,}: use more text, or at most {size:,}")
        return cls({_MAIN: backend.to_str(pretty=True).encode()})

    @classmethod
    def load(cls, path: Path, end_of_text: str | None = None) -> Self:
        """Loads a tokenizer.json, or a folder that contains one, written by thinpipe or Hugging Face.

        The end-of-text token is `end_of_text`, else the folder's eos_token, else <|endoftext|>. Raises DataError.
        """
        main = path / _MAIN if path.is_dir() else path
        if not main.is_file():
            raise DataError(
                f"{main} does not exist: name a {_MAIN} or a folder that has one (transformers converts other "
                "tokenizers: AutoTokenizer.from_pretrained(folder).save_pretrained(new_folder))"
            )
        others = (main.with_name(name) for name in _COPIED_FILES)
        files = {_MAIN: main.read_bytes(), **{other.name: other.read_bytes() for other in others if other.is_file()}}
        try:
            return cls(files, end_of_text)
        except DataError as error:
            raise DataError(f"{main}: {error}") from error
        except Exception as error:  # the library raises bare Exception for anything it cannot parse
            raise DataError(
                f"{main} (or {_CONFIG} beside it) cannot be read by the library tokenizers: {error}"
            ) from error

    def save(self, folder: Path) -> None:
        """Writes a folder for `Tokenizer.load`, `tokenizers.Tokenizer.from_file` (tokenizer.json) and
        `transformers.AutoTokenizer.from_pretrained`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in sorted(self._files.items(), key=lambda item: item[0] == _MAIN):
            write_atomically(folder / name, data)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Token ids of each text, without end-of-text. Uses all cores unless TOKENIZERS_PARALLELISM is false."""
        pieces = [list(cut_into_pieces(text)) for text in texts]
        encoded = self._encode_pieces(piece for of_text in pieces for piece in of_text)
        return [np.concatenate([next(encoded) for _ in of_text]) for of_text in pieces]

    def _encode_pieces(self, pieces: Iterable[str]) -> Iterator[npt.NDArray[np.uint32]]:
        # In groups, because the library's result objects take about 100 bytes per token.
        for group in group_by_size(pieces, len, ENCODE_CHARS):
            for encoding in self._backend.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, np.uint32)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that stand for no text, such as those that end a turn of a chat."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)


def _end_of_text(config_file: bytes | None) -> str | None:
    """The eos_token of a tokenizer_config.json, which may be a string or an object."""
    token: Any = json.loads(config_file).get("eos_token") if config_file else None
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _config_files(end_of_text: str) -> dict[str, bytes]:
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end_of_text)
    config = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,  # it would change decoded text
        "model_max_length": 10**30,  # no limit: the limit belongs to the model
    }
    return {_CONFIG: json.dumps(config, indent=2).encode(), _SPECIAL: json.dumps(special, indent=2).encode()}


def _content_sha256(content: dict[str, Any], end_of_text: str) -> str:
    """Hash of the parts of a tokenizer.json that determine token ids; file layout and padding settings do not count."""
    deciding = {name: content.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    text = json.dumps([deciding, end_of_text], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
