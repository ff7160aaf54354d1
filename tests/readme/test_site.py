"""The site of the documentation: every page has a place, links lead to places, and Sphinx's warnings are errors."""

import re

import pytest

from tests.readme.pages import ROOT, guides, program


@pytest.fixture(scope="module")
def make_site():
    with program(ROOT / "docs/make_site.py") as module:
        yield module


@pytest.fixture(scope="module")
def sources(make_site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    make_site.write_sources(folder)
    return folder


def test_every_page_has_a_place(make_site, sources):
    places = make_site.pages()
    assert {path.relative_to(ROOT).as_posix() for path in guides()} <= set(places)
    assert len(set(places.values())) == len(places)
    listed = re.findall(r"^(?:[\w ,]+<)?([\w/-]+)>?$", (sources / "index.md").read_text(), re.MULTILINE)
    assert sorted(f"{name}.md" for name in listed) == sorted(set(places.values()) - {"index.md"})


def test_every_link_leads_to_a_page_a_picture_or_the_web(sources):
    for page in sources.rglob("*.md"):
        text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path = target.partition("#")[0]
            assert "://" in path or not path or (page.parent / path).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    ("page", "text", "there"),
    [
        ("docs/howto/plan.md", "[a](../../README.md#try-it)", "[a](../about.md#try-it)"),
        ("README.md", "![a plan](docs/overview.png)", "![a plan](pictures/docs/overview.png)"),
        (
            "docs/README.md",
            "[a](../benchmarks/results)",
            "[a](https://github.com/thinpipe/thinpipe/tree/main/benchmarks/results)",
        ),
        ("docs/results.md", "`[a](b.md)` [c](https://d.net/e)", "`[a](b.md)` [c](https://d.net/e)"),
    ],
)
def test_a_link_of_the_repository_becomes_one_of_the_site(make_site, page, text, there):
    assert make_site.on_the_site(text, page, make_site.pages(), set()) == there


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore::DeprecationWarning")  # of Sphinx's extensions
@pytest.mark.parametrize(
    ("text", "code"), [("[here](#a-page)", 0), ("[nowhere](#missing)", 1), ("[nowhere](missing.md)", 1)]
)
def test_a_broken_link_fails_the_site(make_site, tmp_path, text, code):
    (tmp_path / "index.md").write_text(f"# A page\n\n{text}\n")
    assert make_site.build(tmp_path, tmp_path / "html") == code
