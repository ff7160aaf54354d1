"""Words of an earlier vocabulary for things that have a name in the field: `python -m tests.vocabulary` lists them.

`identifiers` has the words of names, `messages` the phrases of texts for people, `sources` what of a file is either.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.vocabulary.identifiers import old_word
from tests.vocabulary.messages import old_phrases
from tests.vocabulary.sources import files_in, messages_of, names_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Found:
    path: Path
    line: int
    """Line at which the name or the message begins."""
    text: str
    word: str
    instead: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.text!r} has {self.word!r}: say {self.instead}"


def search(root: Path = ROOT) -> Iterator[Found]:
    for path in files_in(root):
        file = path.relative_to(root).as_posix()
        for line, name in names_of(path):
            if found := old_word(name, file):
                yield Found(path, line, name, *found)
        for line, text in messages_of(path):
            for phrase, instead in old_phrases(text, file):
                yield Found(path, line, " ".join(text.split())[:160], phrase, instead)
