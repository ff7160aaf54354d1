"""The page can be read: contrast of its colours, its landmarks and names, and nothing that colour alone says."""

import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

HTML = (files("thinpipe.monitor") / "page.html").read_text(encoding="utf-8")
STYLE = re.search(r"<style>(.*?)</style>", HTML, re.DOTALL)[1]
COLOURS = {
    name: {"light": light, "dark": dark}
    for name, light, dark in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", STYLE)
}
GROUNDS, FILLS = ("ground", "card"), ("track",)
DECORATION = {"line", "grid", *GROUNDS, *FILLS}


def luminance(colour):
    """Relative luminance of WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_the_standard_says():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize("name", sorted(COLOURS.keys() - DECORATION))
def test_every_colour_of_text_stands_out_from_both_grounds(name, look):
    for ground in GROUNDS:
        assert contrast(COLOURS[name][look], COLOURS[ground][look]) >= 4.5, (name, ground)


@pytest.mark.parametrize("look", ["light", "dark"])
def test_a_bar_stands_out_from_its_track(look):
    assert contrast(COLOURS["accent"][look], COLOURS["track"][look]) >= 3


def test_no_text_has_a_colour_that_was_not_compared():
    used = set(re.findall(r"(?<![-\w])(?:color|fill): var\(--(\w+)\)", STYLE))
    assert used
    assert used <= COLOURS.keys() - DECORATION
    assert not re.search(r"(?<![-\w])color: (?!var|inherit|light)", STYLE), "colours are named once, above"
    assert set(re.findall(r"var\(--(\w+)\)", STYLE)) == COLOURS.keys(), "none is missing, none is left over"


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []
        self.feed(HTML)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


ELEMENTS = Elements().found


def test_landmarks_and_names_lead_through_the_page():
    tags = [tag for tag, _ in ELEMENTS]
    assert [tags.count(tag) for tag in ("header", "main", "footer", "h1")] == [1] * 4
    assert ("html", {"lang": "en"}) in ELEMENTS
    ids = {attributes["id"] for _, attributes in ELEMENTS if "id" in attributes}
    for tag, attributes in ELEMENTS:
        if tag == "section":
            assert "aria-labelledby" in attributes or attributes.get("role") == "alert", attributes
        for reference in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(reference, "now-title") in ids
    first_link = next(attributes for tag, attributes in ELEMENTS if tag == "a")
    assert first_link["href"].removeprefix("#") in ids, "the first thing that Tab reaches leads to the events"


def test_what_scrolls_or_can_be_pointed_at_can_be_reached_by_keyboard():
    reached = {attributes.get("id") for _, attributes in ELEMENTS if attributes.get("tabindex") == "0"}
    assert reached == {"chart", "news"}
    assert all(f'"{key}"' in HTML or f"{key}:" in HTML for key in ("ArrowLeft", "ArrowRight", "Home", "End", "Escape"))
    assert ":focus-visible" in STYLE
    assert "prefers-reduced-motion" in STYLE
    assert not re.search(r"(?<!document)\.title =", HTML), "nothing is said by pointing alone"


def test_colour_is_never_alone():
    """Beside each red or green there is a word or another shape."""
    assert '"problem"' in HTML
    assert '"not connected"' in HTML
    assert '"slowest"' in HTML
    shapes = {re.search(rf'draw\("(\w+)", {{class: "{kind}"', HTML)[1] for kind in ("loss", "valid", "recomputed")}
    assert len(shapes) == 3


def test_both_looks_can_be_chosen_and_the_systems_is_the_default():
    assert 'THEMES = ["system", "light", "dark"]' in HTML
    for look in ("light", "dark"):
        assert f':root[data-theme="{look}"] {{ color-scheme: {look}; }}' in STYLE
