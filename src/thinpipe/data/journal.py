"""How far an unfinished tokenization is: what it is made of, and what of it is on the disk. Written beside the tokens
until they are finished."""

import dataclasses
from pathlib import Path

import msgspec
import tokenizers

from thinpipe.config.data import TokenizeConfig
from thinpipe.core.errors import DECODE_ERRORS, DataError
from thinpipe.core.files import remove_durably, remove_partial_files, write_atomically
from thinpipe.core.units import format_names
from thinpipe.data.chat.encoding import ChatCounts
from thinpipe.data.shards import WriterState
from thinpipe.data.sources import Split, SplitText
from thinpipe.data.tokenizer import TOKENIZER_FILES

JOURNAL_NAME = "unfinished.json"
_BLOCKS = "1"
"""Version of the rule by which text is cut into blocks (`data.blocks`)."""
_FREE = ("output", "workers", "overwrite")
"""Settings that change no token."""
_MAX_NAMED = 3


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    made_of: dict[str, str]
    """Everything from which the tokens follow (`made_of`)."""
    blocks: int
    """Blocks whose tokens are on the disk."""
    text_sha256: str
    """`TextHash` of these blocks."""
    sides: dict[Split, WriterState]
    chats: dict[Split, ChatCounts]

    @property
    def text_nbytes(self) -> int:
        return sum(state.text_nbytes for state in self.sides.values())


def made_of(config: TokenizeConfig, text: SplitText) -> dict[str, str]:
    """Settings, versions, and sizes and times of the files: by name, as text that differs where the tokens may."""
    settings = {field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)}
    found = {name: value for name, value in settings.items() if name not in _FREE}
    found |= {"blocks": _BLOCKS, "the library tokenizers": tokenizers.__version__}
    folder = config.tokenizer
    own = [] if folder is None else [(folder if folder.is_dir() else folder.parent) / name for name in TOKENIZER_FILES]
    for path in [*text.files, *(file for file in own if file.is_file())]:
        status = path.stat()
        found[f"the file {path}"] = f"{status.st_size} bytes of {status.st_mtime_ns}"
    return found


class Journal:
    def __init__(self, output: Path) -> None:
        self._output, self.path = output, output / JOURNAL_NAME

    def find(self, made_of: dict[str, str], *, overwrite: bool) -> JournalEntry | None:
        """The entry of an unfinished tokenization that these make, if there is one. Raises DataError where there is
        one of others, unless that may be overwritten or has no tokens yet."""
        try:
            entry = msgspec.json.decode(self.path.read_bytes(), type=JournalEntry)
        except FileNotFoundError:
            return None
        except DECODE_ERRORS as error:
            raise DataError(f"{self.path} is damaged ({error}): remove it to begin anew") from error
        names = [name for name in made_of | entry.made_of if made_of.get(name) != entry.made_of.get(name)]
        if not names:
            return entry
        if overwrite or not entry.blocks:
            return None
        listed = format_names(names, _MAX_NAMED)
        raise DataError(
            f"{self._output} holds unfinished tokens, and since they were begun {listed} changed: go on with what they "
            "were begun with, or pass --overwrite to begin anew"
        )

    def write(self, entry: JournalEntry) -> None:
        write_atomically(self.path, msgspec.json.encode(entry))

    def remove(self) -> None:
        """Removes the journal, and what a killed writer of one left."""
        remove_durably(self.path)
        remove_partial_files(self._output)
