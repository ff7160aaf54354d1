"""Renders a report as one self-contained HTML file: inline SVG, light and dark mode, phone and print layout, no
script."""

from html import escape
from importlib import resources

from thinpipe.report.document import Block, Code, Collapsible, Facts, Picture, Quote, Report, Section, Table, Text
from thinpipe.report.figures import inline_svg


def html_page(report: Report) -> str:
    style = resources.files("thinpipe.report").joinpath("page.css").read_text(encoding="utf-8")
    title = escape(report.title)
    body = "\n".join(_section(section) for section in report.sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · thinpipe</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><p>{escape(report.subtitle)}</p></header>
<main>
{body}
</main>
</body>
</html>
"""


def _section(section: Section) -> str:
    return f"<section><h2>{escape(section.title)}</h2>\n{_blocks(section.blocks)}\n</section>"


def _blocks(blocks: list[Block | Collapsible]) -> str:
    return "\n".join(_block(block) for block in blocks)


def _block(block: Block | Collapsible) -> str:
    match block:
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Facts(entries):
            cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in entries)
            return f"<dl>{cells}</dl>"
        case Table(head, rows):
            lines = [_row("th", head), *(_row("td", row) for row in rows)]
            return f'<div class="wide"><table>{"".join(lines)}</table></div>'
        case Code(text, _):
            return f"<pre>{escape(text)}</pre>"
        case Quote(prompt, text):
            return f"<blockquote><b>{escape(prompt)}</b>{escape(text)}</blockquote>"
        case Picture(name, figure, caption):
            svg = inline_svg(figure, name, escape(caption))
            return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
        case Collapsible(title, blocks):
            return f"<details><summary>{escape(title)}</summary>\n{_blocks([*blocks])}\n</details>"


def _row(tag: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"
