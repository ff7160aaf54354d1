"""Writes a report to a folder: report.html, report.md, and the PNG files of the latter."""

from pathlib import Path

from thinpipe.core.files import write_atomically
from thinpipe.report.document import Report
from thinpipe.report.figures import save_png
from thinpipe.report.html_page import html_page
from thinpipe.report.markdown_page import markdown_page


def save_report(report: Report, folder: Path) -> Path:
    """Writes all files and returns the path of the HTML page."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in report.pictures:
        save_png(picture.figure, folder / f"{picture.name}.png")
    write_atomically(folder / "report.md", markdown_page(report).encode())
    page = folder / "report.html"
    write_atomically(page, html_page(report).encode())
    return page
