"""A report as plain data: sections of blocks, which `html_page` and `markdown_page` write down in their own ways."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Facts:
    """A few figures that stand out: (what, how much)."""

    entries: list[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Code:
    text: str
    language: str = ""


@dataclass(frozen=True)
class Quote:
    """Text that a model wrote after a prompt."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Picture:
    name: str
    """Of its file, without the ending."""
    figure: "Figure"
    caption: str


Block = Text | Facts | Table | Code | Quote | Picture


@dataclass(frozen=True)
class Folded:
    """Long things that few people want to see at once."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Section:
    title: str
    blocks: list[Block | Folded]


@dataclass(frozen=True)
class Report:
    title: str
    subtitle: str
    sections: list[Section] = field(default_factory=list)

    @property
    def pictures(self) -> list[Picture]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]
