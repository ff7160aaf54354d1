"""What the scan reads of a file: names (identifiers, keys, strings that name things) and messages (texts for people).

Python modules, the TOML files that come with thinpipe, the dashboard page and the documentation.
"""

import ast
import html
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Text = tuple[int, str]
"""Line number and text."""
CODE = ("src", "benchmarks", "examples")
HISTORY = ("docs/log.md", "benchmarks/results/")
"""Files that record what was, in the words of its time."""


def files_in(root: Path) -> Iterator[Path]:
    for folder in CODE:
        for suffix in ("py", "toml", "html", "service"):
            yield from sorted((root / folder).rglob(f"*.{suffix}"))
    pages = [*root.glob("*.md"), *(path for folder in ("docs", *CODE) for path in (root / folder).rglob("*.md"))]
    yield from (page for page in sorted(pages) if not page.relative_to(root).as_posix().startswith(HISTORY))


def names_of(path: Path) -> Iterator[Text]:
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            yield 1, path.stem
            yield from _python_names(ast.parse(text))
        case ".toml":
            yield from ((_line_of(key, text), key) for key in _keys(tomllib.loads(text)))
        case ".html":
            scripts = re.finditer(r"<script>(.*?)</script>", text, re.DOTALL)
            for script in scripts:
                code = re.sub(r"//[^\n]*|`[^`]*`|\"[^\"\n]*\"|'[^'\n]*'", _blank, script[1])
                for name in re.finditer(r"[A-Za-z_$][\w$]*", code):
                    yield text.count("\n", 0, script.start(1) + name.start()) + 1, name[0]
            for name in re.finditer(r"\b(?:id|class)=\"([\w -]+)\"", text):
                yield from ((text.count("\n", 0, name.start()) + 1, part) for part in re.split(r"[ -]", name[1]))


def messages_of(path: Path) -> Iterator[Text]:
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            yield from _python_texts(ast.parse(text))
            yield from _comments(text)
        case ".toml" | ".service":
            yield from (
                (number, line.partition("#")[2]) for number, line in enumerate(text.splitlines(), 1) if "#" in line
            )
        case ".html":
            yield from ((number, html.unescape(line)) for number, line in enumerate(text.splitlines(), 1))
        case ".md":
            yield from _paragraphs(text)


def _python_names(tree: ast.AST) -> Iterator[Text]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.alias(name=name, asname=asname):
                yield from ((node.lineno, part) for part in (*name.split("."), asname) if part)
            case ast.Constant(value=str(text)) if re.fullmatch(r"[A-Za-z_]\w*", text):
                yield node.lineno, text


def _python_texts(tree: ast.AST) -> Iterator[Text]:
    """Strings of more than one word, docstrings and f-strings. A value in an f-string is read as "{}"."""
    parts = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(id(part) for part in node.values)
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values),
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in parts
        ):
            yield node.lineno, node.value


def _comments(text: str) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _paragraphs(text: str) -> Iterator[Text]:
    """Paragraphs of a page, without blocks of code."""
    line, code = 1, False
    for block in text.split("\n\n"):
        if block.count("```") % 2 == 0 and not code:
            yield line, re.sub(r"```.*?```", "", block, flags=re.DOTALL)
        code ^= block.count("```") % 2 == 1
        line += block.count("\n") + 2


def _keys(table: dict[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield key
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                yield from _keys(inner)


def _line_of(key: str, text: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if key in line)


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])
