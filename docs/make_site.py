"""Makes the documentation a site: sphinx, furo and myst over docs/ and the pages beside the README.

    pip install -e ".[docs]"
    python docs/make_site.py              # build/site/html/index.html
    python docs/make_site.py --output DIR

The pages stay what they are in the repository, where their links work too. Sphinx reads copies, in which a link to
another page leads to its place on the site, and a link to any other file of the repository to its place on the web.
Warnings are errors: a link to a page or heading that does not exist, a page that is in no list. docs/README.md is the
first page; its headings and the links below them are the contents at the side.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ON_THE_WEB = "https://github.com/thinpipe/thinpipe/{kind}/main/{path}"
INDEX = "docs/README.md"
BESIDE_THE_README = {
    "README.md": "about.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "ROADMAP.md": "roadmap.md",
    "SECURITY.md": "reporting-security.md",
}
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def pages() -> dict[str, str]:
    """Path in the repository -> path on the site."""
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    return BESIDE_THE_README | {path: path.removeprefix("docs/") for path in found} | {INDEX: "index.md"}


def on_the_site(text: str, page: str, site: dict[str, str], pictures: set[str]) -> str:
    """`text` of the repository's `page` with the links of the site; adds the pictures that it shows to `pictures`."""

    def led(found: re.Match[str]) -> str:
        path, hash_sign, anchor = found["target"].partition("#")
        if "://" in path or not path:
            return found[0]
        there = Path(os.path.normpath(Path(page).parent / path)).as_posix()
        here = Path(site[page]).parent
        if there in site:
            return f"]({relative(site[there], here)}{hash_sign}{anchor})"
        if there.endswith((".png", ".svg", ".gif")):
            pictures.add(there)
            return f"]({relative(f'pictures/{there}', here)})"
        kind = "tree" if (ROOT / there).is_dir() else "blob"
        return f"]({ON_THE_WEB.format(kind=kind, path=there)}{hash_sign}{anchor})"

    parts = _CODE.split(text)
    return "".join(part if part.startswith("`") else _LINK.sub(led, part) for part in parts)


def relative(path: str, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def contents(index: str, site: dict[str, str]) -> str:
    """What Sphinx reads as the tree of pages: for each heading of the first page, the pages that its links lead to."""
    lists, seen = [], {site[INDEX]}
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        names = [target.partition("#")[0] for target in _LINK.findall(text)]
        listed = [name for name in dict.fromkeys(names) if name in site.values() and name not in seen]
        seen |= set(listed)
        lines = "\n".join(name.removesuffix(".md") for name in listed)
        lists.append(f"```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{lines}\n```\n")
    home = ON_THE_WEB.partition("/{kind}")[0]
    about = f"```{{toctree}}\n:hidden:\n\nWhat it is, what it costs <about>\nRepository <{home}>\n```\n"
    return "\n".join([about, *lists])


def write_sources(folder: Path) -> None:
    """The pages as Sphinx reads them, with their pictures."""
    site, pictures = pages(), set[str]()
    for page, place in site.items():
        text = on_the_site((ROOT / page).read_text(encoding="utf-8"), page, site, pictures)
        if page == INDEX:
            text += "\n" + contents(text, site)
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text, encoding="utf-8")
    for picture in pictures:
        (folder / "pictures" / picture).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / picture, folder / "pictures" / picture)


def build(source: Path, html: Path) -> int:
    """Runs Sphinx; returns its exit code, which is not 0 if it warns."""
    from sphinx.cmd.build import main as sphinx

    settings = ("--conf-dir", ROOT / "docs", "--fail-on-warning", "--keep-going", "--quiet", "--jobs", "auto")
    return sphinx([str(word) for word in (*settings, source, html)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the documentation a site.")
    parser.add_argument("--output", type=Path, default=ROOT / "build/site", help="folder of the site, below it html/")
    folder = parser.parse_args().output
    for name in ("source", "html"):
        shutil.rmtree(folder / name, ignore_errors=True)
    write_sources(folder / "source")
    code = build(folder / "source", folder / "html")
    if code == 0:
        print(f"the site is in {folder / 'html/index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
