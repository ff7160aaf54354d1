"""The short help of a verb that takes a settings file: about twenty lines with the settings that are usually changed.
`--help-all` shows every setting."""

import inspect
import textwrap
from typing import Any

from thinpipe.cli.commands import Verb
from thinpipe.config.describe import flags_of
from thinpipe.config.presets import preset_names


def short_help(name: str, verb: Verb, settings: Any = None) -> str:
    """`settings`: of the file that was named, whose values are shown in place of the defaults."""
    flags = {flag.name: flag for flag in flags_of(verb.config, settings)}
    about = inspect.cleandoc(verb.config.__doc__ or "").split("\n\n")[0]
    lines = [
        *textwrap.wrap(f"{' '.join(about.split()).split(': thinpipe')[0].rstrip('.')}.", 80),
        "",
        f"usage: thinpipe {name} RUN.toml [--section.field VALUE ...]",
        "",
        "RUN.toml: a settings file (`thinpipe new` writes one) or a preset:",
        f"{', '.join(preset_names())}. A flag overrides the file.",
        "",
        "usual settings:",
    ]
    column = max(map(len, verb.usual)) + 2
    for flag, words in verb.usual.items():
        default = flags[flag].default.replace("`", "")
        end = "" if default in ("none", "empty", "false") else f" [{default}]"
        line = f"  --{flag:<{column}}{words}{end}"
        lines.append(line if len(line) <= 80 else f"{line[:76]}...]")
    return "\n".join([*lines, "", f"All {len(flags)} settings: thinpipe {name} --help-all"])
