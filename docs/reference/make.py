"""Writes settings.md and commands.md beside this file from the dataclasses that the command line is made of, and api.md
from the docstrings of the public names.

    python docs/reference/make.py

A test makes them again and fails when they are stale. No torch: what `--help` shows is all that is read, and the
modules of the API are parsed, not imported.
"""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import thinpipe
from thinpipe.cli.commands import VERBS, Verb
from thinpipe.config.hub import HubConfig
from thinpipe.config.run import RunConfig
from thinpipe.core import bounds

HERE = Path(__file__).parent
NOTE = "<!-- Made by docs/reference/make.py from the settings' own classes: change those, then run it again. -->"
WORDS = {
    "int": "integer",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "Path": "path",
    "NoneType": "none",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    type: str
    default: str
    help: str
    positional: str = ""
    """What stands for it on a command line that gives it without a flag."""


def settings_page() -> str:
    """Every section that a run file may have, in the order of the classes."""
    parts = [
        f"# Settings\n\n{NOTE}\n",
        "Every key of a run file, with its default. On the command line `[training] steps` is `--training.steps`,\n"
        "with hyphens for underscores, and a flag beats the file. `none` is what a key is when it is left out; a flag\n"
        "says it as `None`. `[hub]` is read by `thinpipe hub` alone.\n",
    ]
    for path, section, values in sections(HubConfig):
        rows = [[f"`{entry.name}`", entry.type, entry.default, entry.help] for entry in settings_of(section, values)]
        if rows:
            parts.append(f"## `[{path}]`\n\n{_about(section)}{_table(['key', 'is', 'default', 'what it does'], rows)}")
    return "\n".join(parts)


def commands_page() -> str:
    """Every verb, with its flags."""
    parts = [f"# Commands\n\n{NOTE}\n", "`thinpipe VERB --help` shows the same.\n"]
    return "\n".join(parts + [_command(name, verb) for name, verb in VERBS.items()])


def _command(name: str, verb: Verb) -> str:
    entries = [entry for entry in _flags(verb.config) if not _is_of_a_run(verb, entry)]
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
    return verb.starts_with_file and (section == "hub" or section in {field.name for field in _fields(RunConfig)})


def _flags(config: type[Any]) -> Iterator[Setting]:
    yield from (_as_flag(entry) for entry in settings_of(config))
    for path, section, values in sections(config):
        yield from (_as_flag(entry, f"{path}.") for entry in settings_of(section, values))


def _as_flag(entry: Setting, prefix: str = "") -> Setting:
    return dataclasses.replace(entry, name=f"{prefix}{entry.name}".replace("_", "-"))


def sections(config: type[Any], values: Any = None, prefix: str = "") -> Iterator[tuple[str, type[Any], Any]]:
    """The dataclasses among the fields, with paths and defaults: ("model.subspace", SubspaceConfig, its default)."""
    for field, hint in _hinted(config):
        section = _section(hint)
        if section is not None:
            default = _default(field, values)
            yield f"{prefix}{field.name}", section, default
            yield from sections(section, default, f"{prefix}{field.name}.")


def settings_of(config: type[Any], values: Any = None) -> list[Setting]:
    """The fields that are no sections; `values` has defaults that are not the class's own."""
    helps = _helps(config)
    return [
        Setting(
            name=field.name,
            type=_type_in_words(hint),
            default=_value_in_words(_default(field, values)),
            help=helps.get(field.name, ""),
            positional=_positional(field.name, hint),
        )
        for field, hint in _hinted(config)
        if _section(hint) is None
    ]


def _hinted(config: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(config, include_extras=True)
    return [(field, hints[field.name]) for field in _fields(config)]


def _fields(config: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(config)


def _section(hint: Any) -> type[Any] | None:
    """The class of a section, also of one that may be left out."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((each for each in options if isinstance(each, type) and dataclasses.is_dataclass(each)), None)


def _helps(config: type[Any]) -> dict[str, str]:
    """The text under each field, of a class and of those that it is made from."""
    found: dict[str, str] = {}
    for owner in reversed(config.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(tree, ast.ClassDef)
        for line, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[line.target.id] = " ".join(text.value.split())
    return found


def _type_in_words(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Annotated:
        return _type_in_words(typing.get_args(hint)[0])
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{option}`" for option in options)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_type_in_words(option) for option in options)
    if typing.get_origin(hint) is tuple:
        return f"list of {_type_in_words(options[0])}"
    return WORDS.get(hint.__name__, str(hint.__name__))


def _default(field: dataclasses.Field[Any], values: Any) -> Any:
    if values not in (None, dataclasses.MISSING):
        return getattr(values, field.name)
    return field.default_factory() if callable(field.default_factory) else field.default


def _value_in_words(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "must be given"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`" if value else "empty"
    return f"`{value}`" if str(value) else "empty"


def _positional(name: str, hint: Any) -> str:
    marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    if not any("Positional" in repr(mark) for mark in marks):
        return ""
    return next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), name.upper())


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
