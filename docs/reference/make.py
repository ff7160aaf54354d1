"""Writes settings.md and commands.md beside this file from the dataclasses that the command line is made of, and api.md
from the docstrings of the public names.

    python docs/reference/make.py

A test makes them again and fails when they are stale. No torch: what `--help` shows is all that is read, and the
modules of the API are parsed, not imported.
"""

import ast
import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

import thinpipe
from thinpipe.cli.commands import VERBS, Verb
from thinpipe.config.describe import Setting, flags_of, sections, settings_of, several_of
from thinpipe.config.hub import HubConfig
from thinpipe.config.run import RunConfig
from thinpipe.core import bounds

HERE = Path(__file__).parent
NOTE = "<!-- Made by docs/reference/make.py from the settings' own classes: change those, then run it again. -->"


def settings_page() -> str:
    """Every section that a run file may have, in the order of the classes."""
    parts = [
        f"# Settings\n\n{NOTE}\n",
        "Every key of a run file, with its default. On the command line `[training] steps` is `--training.steps`,\n"
        "with hyphens for underscores, and a flag beats the file. `none` is what a key is when it is left out; a flag\n"
        "says it as `None`. `[hub]` is read by `thinpipe hub` alone.\n",
    ]
    several = {*several_of(HubConfig)}
    for path, section, values in sections(HubConfig):
        rows = [[f"`{entry.name}`", entry.type, entry.default, entry.help] for entry in settings_of(section, values)]
        if rows:
            title = f"[[{path}]]" if path in several else f"[{path}]"
            parts.append(f"## `{title}`\n\n{_about(section)}{_table(['key', 'is', 'default', 'what it does'], rows)}")
    return "\n".join(parts)


def commands_page() -> str:
    """Every verb, with its flags."""
    parts = [f"# Commands\n\n{NOTE}\n", "`thinpipe VERB --help` shows the usual ones, `--help-all` the same as here.\n"]
    return "\n".join(parts + [_command(name, verb) for name, verb in VERBS.items()])


def _command(name: str, verb: Verb) -> str:
    entries = [entry for entry in flags_of(verb.config) if not _is_of_a_run(verb, entry)]
    words = ["RUN.toml"] if verb.starts_with_file else []
    words += [entry.positional for entry in entries if entry.positional]
    text = f"## `{' '.join(['thinpipe', name, *words])}`\n\n{_about(verb.config)}"
    if verb.starts_with_file:
        text += "Takes every key of a run file as `--section.field value`: see [settings](settings.md).\n"
    rows = [[f"`{entry.positional or '--' + entry.name}`", entry.type, entry.default, entry.help] for entry in entries]
    return text + ("\n" * verb.starts_with_file + _table(["argument", "is", "default", "what it does"], rows)) * bool(
        rows
    )


def _is_of_a_run(verb: Verb, entry: Setting) -> bool:
    section = entry.name.split(".")[0].replace("-", "_")
    return verb.starts_with_file and (
        section == "hub" or section in {field.name for field in dataclasses.fields(RunConfig)}
    )


def _about(config: type[Any]) -> str:
    """A class that says nothing of itself has the signature that dataclasses write."""
    text = inspect.cleandoc(config.__doc__ or "")
    return "" if text.startswith(f"{config.__name__}(") else f"{text}\n\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


API: dict[str, tuple[str, ...]] = {
    "Train": ("train", "Run", "Losses", "tokenize"),
    "Events that callbacks get": ("Started", "Step", "Validated", "Saved", "Stopped"),
    "Use a model": ("load", "LoadedModel"),
    "Plan": ("plan", "Plan"),
    "Compress the boundaries of a pipeline of your own": ("CompressedStage", "CompressedSequential", "codec", "Codec"),
    "Write a compressor": (
        "Compressor",
        "register_compressor",
        "MessageShape",
        "MessageContext",
        "pack_bits",
        "unpack_bits",
    ),
    "Settings": ("RunConfig", "BoundaryConfig", "CompressionConfig"),
    "Errors": ("UserError", "RunFailedError"),
}
"""Every public name, by what it is for."""
API_INTRODUCTION = """Every public name of `import thinpipe`, which imports no torch until a name needs it and has
types for editors and checkers (`py.typed`). Versions are semantic: from 1.0 on, what this page states changes
incompatibly only with a new major version, and until then only with a new minor version (0.1 to 0.2), with a line in
the [changelog](../../CHANGELOG.md). Modules, and names that are not on this page, may change in any release. Examples:
[a notebook](../../examples/notebook.py), [a model of your own](../../examples/own_model.py),
[a boundary method of your own](../../examples/custom_boundary.py).

To compress the boundaries of a pipeline of your own, write `CompressedStage` in place of torch's `PipelineStage`:

```python
stage = thinpipe.CompressedStage(module, rank, world_size, device, shape=(B, T, W), boundary="int4")
schedule = Schedule1F1B(stage, n_microbatches, loss_fn=loss_fn)  # torch's, as before
```
"""


def api_page() -> str:
    """Every public name with its signature and docstring."""
    parts = [f"# Python API\n\n{NOTE}\n", API_INTRODUCTION]
    for heading, names in API.items():
        parts += [f"## {heading}\n", *map(_public_name, names)]
    return "\n".join(parts)


def _public_name(name: str) -> str:
    file = Path(thinpipe.__file__).parent.joinpath(*thinpipe._MODULES[name].split(".")[1:]).with_suffix(".py")
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    (node,) = (part for part in nodes if isinstance(part, ast.FunctionDef | ast.ClassDef) and part.name == name)
    if isinstance(node, ast.FunctionDef):
        return f"### `{name}`\n\n{_signature(node)}\n{_doc(node)}\n"
    return f"### `{name}`\n\n{_doc(node)}\n\n{_members(node)}"


class _WithoutBounds(ast.NodeTransformer):
    """Types as they are without the bounds that values of other machines must keep."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        is_bounded = isinstance(node.value, ast.Name) and node.value.id == "Annotated"
        return node.slice.elts[0] if is_bounded and isinstance(node.slice, ast.Tuple) else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = typing.get_args(getattr(bounds, node.id, None))
        return ast.Name(known[0].__name__) if known and isinstance(known[0], type) else node


def _type(annotation: ast.expr) -> str:
    return ast.unparse(_WithoutBounds().visit(annotation))


def _members(node: ast.ClassDef) -> str:
    """Constructor, methods and fields; those of settings are on the page of settings."""
    if node.name.endswith("Config"):
        return "Fields: see [settings](settings.md).\n"
    text = ""
    for member, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name) and member.target.id[0] != "_":
            stated = after.value if isinstance(after, ast.Expr) else None
            help_text = f": {_flowed(stated.value)}" if isinstance(stated, ast.Constant) else ""
            text += f"- `{member.target.id}`: `{_type(member.annotation)}`{help_text}\n"
        elif isinstance(member, ast.FunctionDef) and _is_public(member):
            text += _method(node.name, member)
    return text


def _is_public(node: ast.FunctionDef) -> bool:
    """A method that is for callers: overrides of another library's methods have no docstring."""
    return bool(_doc(node)) and (node.name[0] != "_" or node.name == "__init__")


def _method(owner: str, node: ast.FunctionDef) -> str:
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    if marks & {"property", "cached_property"}:
        assert node.returns is not None
        return f"- `{node.name}`: `{ast.unparse(node.returns)}`{': ' if _doc(node) else ''}{_flowed(_doc(node))}\n"
    called = owner if node.name == "__init__" else f"{owner}.{node.name}"
    return f"\n{_signature(node, called)}\n{_doc(node)}\n\n"


def _signature(node: ast.FunctionDef, called: str = "") -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("cls, ").removeprefix("self")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"```python\n{called or node.name}({arguments}){returns}\n```\n"


def _doc(node: ast.FunctionDef | ast.ClassDef) -> str:
    return ast.get_docstring(node) or ""


def _flowed(text: str) -> str:
    return " ".join(text.split())


PAGES = {"settings.md": settings_page, "commands.md": commands_page, "api.md": api_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
