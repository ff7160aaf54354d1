"""Writes the page and its two figures."""

from argparse import ArgumentParser
from datetime import date
from pathlib import Path

from benchmarks.scale import figures, page


def main() -> None:
    parser = ArgumentParser(description="How far pipelines of home machines go, by the clock of thinpipe plan.")
    parser.add_argument("--output", type=Path, required=True, help="the folder for the page and its figures")
    parser.add_argument("--draws", type=int, default=16, help="pipelines drawn at random for each row")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    name = f"scale_{date.today()}"
    text = page.page(draws=asked.draws, name=name)
    (asked.output / f"{name}.md").write_text(text)
    figures.draw_speed(asked.output / f"{name}_speed.png")
    figures.draw_failures(asked.output / f"{name}_failures.png")
    print(text)


if __name__ == "__main__":
    main()
