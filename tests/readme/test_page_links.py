"""Links between the files of this repository lead somewhere, to the heading that they name."""

import re
from functools import cache
from urllib.parse import unquote, urlsplit

import pytest

from tests.readme.pages import ROOT, guides, prose, read

HIDDEN = ("node_modules", "build", "dist")
PAGES = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") or part in HIDDEN for part in path.relative_to(ROOT).parts)
]


def links(page):
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return [unquote(target) for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def addresses(page):
    """Links to other places of the web. Nothing is fetched: tests run without the internet."""
    return re.findall(r"\]\(([^)\s]*://[^)\s]*)\)|<(https?:[^>]*)>", prose(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_addresses_have_the_form_of_one(page):
    for address in map("".join, addresses(page)):
        parts = urlsplit(address)
        assert parts.scheme == "https", address
        assert re.fullmatch(r"(?:[a-z0-9-]+\.)+[a-z]{2,}", parts.netloc), address


@pytest.mark.parametrize("page", guides(), ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_say_in_words_what_they_show(page):
    for text, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", prose(page)):
        assert len(text.split()) > 2 or "/badge" in target, f"{target}: {text!r}"
    assert "<img" not in prose(page)


@cache
def anchors(page):
    """The names that GitHub gives to the headings of a page."""
    found = {}
    for heading in re.findall(r"^#+ (.*?)\s*$", re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {f"{name}-{count}" if count else name for name, last in found.items() for count in range(last + 1)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_headings_are_named_as_on_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `[model.projection]`, twice\n\n## The [way](x.md) back\n\n# A `[model.projection]`, twice\n```\n# "
        "no\n```\n"
    )
    assert anchors(page) == {"a-modelprojection-twice", "a-modelprojection-twice-1", "the-way-back"}


def test_every_page_of_the_documentation_is_in_its_index():
    index = ROOT / "docs/README.md"
    listed = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
    assert not set((ROOT / "docs").rglob("*.md")) - listed - {index}


def test_every_file_that_the_architecture_names_exists():
    named = re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|html|css))`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    assert len(named) > 50
    missing = [name for name in named if not any((ROOT / folder / name).exists() for folder in ("src/thinpipe", "."))]
    assert not missing
