"""Document model of a report: sections of blocks, rendered by `html_page` and `markdown_page`."""

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
    """Highlighted figures: (label, value)."""

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
    """File name without suffix."""
    figure: "Figure"
    caption: str


Block = Text | Facts | Table | Code | Quote | Picture


@dataclass(frozen=True)
class Collapsible:
    """Blocks that are folded away until the reader opens them."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Section:
    title: str
    blocks: list[Block | Collapsible]


@dataclass(frozen=True)
class Report:
    title: str
    subtitle: str
    sections: list[Section] = field(default_factory=list)

    @property
    def pictures(self) -> list[Picture]:
        """All pictures outside of collapsible blocks."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]
