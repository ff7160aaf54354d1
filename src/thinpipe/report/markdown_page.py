"""Renders a report as Markdown that refers to PNG files beside it."""

from thinpipe.report.document import Block, Code, Collapsible, Facts, Picture, Quote, Report, Table, Text


def markdown_page(report: Report) -> str:
    parts = [f"# {_plain(report.title)}", _plain(report.subtitle)]
    for section in report.sections:
        parts.append(f"## {section.title}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block | Collapsible) -> str:
    match block:
        case Text(text):
            return _plain(text)
        case Facts(entries):
            return "\n".join(f"- {_plain(name)}: **{_plain(value)}**" for name, value in entries)
        case Table(head, rows):
            lines = [head, ["---"] * len(head), *([_plain(cell) for cell in row] for row in rows)]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Code(text, language):
            fence = "```" if "```" not in text else "`````"
            return f"{fence}{language}\n{text}\n{fence}"
        case Quote(prompt, text):
            quoted_lines = (f"**{_plain(prompt)}**" + _plain(text)).splitlines()
            return "\n".join(f"> {line}" for line in quoted_lines)
        case Picture(name, _, caption):
            return f"![{name}]({name}.png)\n\n{_plain(caption)}"
        case Collapsible(title, blocks):
            inner = "\n\n".join(_block(each) for each in blocks)
            return f"<details><summary>{_plain(title)}</summary>\n\n{inner}\n\n</details>"


def _plain(text: str) -> str:
    """Escapes Markdown and HTML: names of runs and peers are arbitrary text."""
    for mark in "\\`*_[]|":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("&", "&amp;").replace("<", "&lt;")
