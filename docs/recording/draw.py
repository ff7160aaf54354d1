"""An asciicast whose events paint whole screens, as an SVG that moves by itself: no script, no font but the reader's.

Frames lie side by side, and a style sheet shows one after the other; rows that return are drawn once. Readers who have
asked for less motion see the last frame.
"""

import json
import re
from html import escape
from itertools import pairwise

CELL_WIDTH, CELL_HEIGHT, MARGIN = 8, 17, 12
SPEED, SHORTEST_SECONDS, LONGEST_SECONDS, LAST_SECONDS = 4, 0.2, 1.0, 6.0
"""How much faster frames follow each other than they did; how long each is shown at least and at most, and the last."""
BACKGROUND, FOREGROUND = "#16181d", "#d7dae0"
COLOURS = ("#3b4048", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d7dae0")
_SGR = re.compile(r"\x1b\[([\d;]*)m")


def svg_of(cast: str) -> str:
    head, *events = map(json.loads, cast.splitlines())
    frames = [
        (seconds, text.removeprefix("\x1b[H\x1b[2J").split("\r\n")) for seconds, kind, text in events if kind == "o"
    ]
    frames = thinned(frames)
    width, height = head["width"] * CELL_WIDTH + 2 * MARGIN, head["height"] * CELL_HEIGHT + 2 * MARGIN
    rows: dict[str, str] = {}
    groups = []
    for number, (_, lines) in enumerate(frames):
        uses = []
        for line, text in enumerate(lines):
            drawn = row(text)
            if drawn:
                name = rows.setdefault(drawn, f"r{len(rows)}")
                uses.append(f'<use href="#{name}" y="{(line + 1) * CELL_HEIGHT}"/>')
        groups.append(f'<g transform="translate({number * width + MARGIN} {MARGIN - 4})">{"".join(uses)}</g>')
    defined = "".join(f'<g id="{name}">{drawn}</g>' for drawn, name in rows.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(head["title"])}">\n<title>{escape(head["title"])}</title>\n'
        f"<style>{style([seconds for seconds, _ in frames], width)}</style>\n<defs>{defined}</defs>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>\n'
        f'<svg width="{width}" height="{height}"><g class="film">\n' + "\n".join(groups) + "\n</g></svg>\n</svg>\n"
    )


def thinned(frames: list[tuple[float, list[str]]]) -> list[tuple[float, list[str]]]:
    """Without those that would be shown too shortly to be seen; the last one stays."""
    kept = frames[-1:]
    for frame in reversed(frames[:-1]):
        if (kept[0][0] - frame[0]) / SPEED >= SHORTEST_SECONDS:
            kept.insert(0, frame)
    return kept


def style(seconds: list[float], width: int) -> str:
    """Moves the film by one frame at each of the times."""
    shown = [min((after - before) / SPEED, LONGEST_SECONDS) for before, after in pairwise(seconds)]
    total, at, keys = sum(shown) + LAST_SECONDS, 0.0, []
    for number, duration in enumerate([*shown, LAST_SECONDS]):
        keys.append(f"{100 * at / total:.3f}%{{transform:translateX({-number * width}px)}}")
        at += duration
    last = f"translateX({-(len(seconds) - 1) * width}px)"
    return (
        f"text{{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;fill:{FOREGROUND}}}"
        f".b{{font-weight:bold}}.d{{opacity:.6}}"
        f".film{{animation:film {total:.1f}s steps(1,end) infinite}}@keyframes film{{{''.join(keys)}}}"
        f"@media(prefers-reduced-motion:reduce){{.film{{animation:none;transform:{last}}}}}"
    )


def row(text: str) -> str:
    """One line of a screen as SVG text at y = 0; empty if nothing is on it."""
    drawn, column, look = [], 0, Look()
    for number, part in enumerate(_SGR.split(text)):
        if number % 2:
            look.change([int(code or 0) for code in part.split(";")])
        elif part:
            if part.strip():
                length = f'textLength="{len(part) * CELL_WIDTH}" lengthAdjust="spacingAndGlyphs"'
                drawn.append(f'<text x="{column * CELL_WIDTH}" {length}{look.attributes()}>{escape(part)}</text>')
            column += len(part)
    return "".join(drawn)


class Look:
    """Colour and weight, as SGR codes change them. Background colours are left out."""

    def __init__(self) -> None:
        self.colour, self.classes = "", set[str]()

    def change(self, codes: list[int]) -> None:
        while codes:
            code = codes.pop(0)
            if code == 0:
                self.colour, self.classes = "", set()
            elif code in (1, 2):
                self.classes.add({1: "b", 2: "d"}[code])
            elif code == 22:
                self.classes = set()
            elif 30 <= code <= 37 or 90 <= code <= 97:
                self.colour = COLOURS[code % 10]
            elif code == 39:
                self.colour = ""
            elif code in (38, 48):
                colour = extended(codes)
                self.colour = colour if code == 38 else self.colour

    def attributes(self) -> str:
        classes = f' class="{" ".join(sorted(self.classes))}"' if self.classes else ""
        return classes + (f' style="fill:{self.colour}"' if self.colour else "")


def extended(codes: list[int]) -> str:
    """A colour of 256, or of red, green and blue; takes its numbers from `codes`."""
    if codes and codes.pop(0) == 2:
        red, green, blue = (codes.pop(0) for _ in range(3))
        return f"#{red:02x}{green:02x}{blue:02x}"
    number = codes.pop(0)
    if number < 16:
        return COLOURS[number % 8]
    if number >= 232:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    cube = [
        0 if level == 0 else 55 + 40 * level
        for level in ((number - 16) // 36, (number - 16) // 6 % 6, (number - 16) % 6)
    ]
    return "#{:02x}{:02x}{:02x}".format(*cube)
