"""The pages of the documentation as tests read them: fenced blocks with the mark above, commands, files, links.

Marks are HTML comments on the line before a block: `<!-- NAME: tests/readme runs these -->` above commands that a test
runs, `<!-- file NAME -->` above a file that a reader is told to save.
"""

import re
import shlex
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    language: str
    mark: str
    text: str


def guides():
    """What people read to do something, where every command must be one."""
    names = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))]


@contextmanager
def program(path):
    """The module of a program that is in no package."""
    spec = spec_from_file_location(f"thinpipe_{Path(path).stem}", path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def blocks(page):
    return [Block(found["language"], found["mark"] or "", found["text"]) for found in _FENCE.finditer(read(page))]


def read(page):
    return Path(page).read_text(encoding="utf-8")


def prose(page):
    """All but blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", read(page)), flags=re.DOTALL)


def commands(page):
    """Every line of a block that starts thinpipe, also through torchrun, as the words after `thinpipe`."""
    lines = "\n".join(block.text for block in blocks(page) if not block.language).replace("\\\n", " ").splitlines()
    words = [line.partition("-m thinpipe ")[2] or line.removeprefix("thinpipe ") for line in lines if _starts(line)]
    return [shlex.split(line, comments=True) for line in words]


def _starts(line):
    return line.startswith("thinpipe ") or (line.startswith(("torchrun", "python")) and "-m thinpipe " in line)


def marked(page, name):
    """The commands under the mark `NAME: tests/readme runs these`, as words."""
    (block,) = (block for block in blocks(page) if block.mark == f"{name}: tests/readme runs these")
    return [shlex.split(line) for line in block.text.strip().splitlines()]


def save_files(page, folder):
    """Writes the files that a page tells its reader to save."""
    for block in blocks(page):
        if block.mark.startswith("file "):
            (folder / block.mark.removeprefix("file ")).write_text(block.text)
