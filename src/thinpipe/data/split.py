"""Which documents are trained on and which are kept for validation: from separate sources, or a part of one.

A part is chosen by the content of each document, so copies of one text never land on both sides, and neither the order
of the files nor what else is there changes the choice.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from thinpipe.data.readers import Document
from thinpipe.data.sources import Source

Side = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class SplitText:
    """At most one of `validation` and `fraction` is given."""

    train: Source
    validation: Source | None = None
    fraction: float | None = None
    seed: int = 0
    max_documents: int | None = None
    """Of `train`, before the split."""

    @property
    def descriptions(self) -> dict[Side, str]:
        """Where the text of each side comes from."""
        if self.validation is not None:
            return {"train": self.train.description, "validation": self.validation.description}
        if self.fraction is not None:
            part = f"{self.fraction:g} of the documents of {self.train.description}"
            return {"train": f"{self.train.description} without the documents for validation", "validation": part}
        return {"train": self.train.description}

    @property
    def total_nbytes(self) -> int | None:
        """Bytes to read, when that is known before reading."""
        sizes = [source.total_nbytes for source in (self.train, self.validation) if source is not None]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) and self.max_documents is None else None

    def documents(self) -> Iterator[tuple[Side, Document]]:
        if self.validation is not None:
            for document in self.validation.documents():
                yield "validation", document
        for document in itertools.islice(self.train.documents(), self.max_documents):
            yield self._side(document.text), document

    def train_texts(self) -> Iterator[str]:
        """What a tokenizer may learn from."""
        for document in itertools.islice(self.train.documents(), self.max_documents):
            if self._side(document.text) == "train":
                yield document.text

    def _side(self, text: str) -> Side:
        if self.fraction is None:
            return "train"
        hashed = hashlib.sha256(f"{self.seed}\n{text}".encode()).digest()
        return "validation" if int.from_bytes(hashed[:6], "big") < self.fraction * 2**48 else "train"
