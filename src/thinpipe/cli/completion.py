"""`thinpipe completion SHELL`: prints the script by which a shell completes verbs, flags, their values and files.

The scripts are made from the settings' classes. tyro can print some, but they complete no file names, and take words of
a help text for values.
"""

import shlex

from thinpipe.cli.commands import VERBS, Verb
from thinpipe.cli.overview import GROUPS
from thinpipe.config.commands import CompletionConfig
from thinpipe.config.describe import flags_of
from thinpipe.config.presets import preset_names

_BASH = """\
_thinpipe() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=""
    if ((COMP_CWORD == 1)); then
        words={verbs}
    else
        case "$previous" in
{values}
        *) case "${{COMP_WORDS[1]}}" in
{flags}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _thinpipe thinpipe
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
"""Lets zsh run what bash runs."""


def run(config: CompletionConfig) -> None:
    print({"bash": _bash, "zsh": lambda: _ZSH + _bash(), "fish": _fish}[config.shell](), end="")


def _bash() -> str:
    values = {flag: choices for verb in VERBS.values() for flag, choices in _flags(verb).items() if choices}
    flags = [
        f"            {name}) words={shlex.quote(' '.join([*_positionals(verb), *_flags(verb)]))} ;;"
        for name, verb in VERBS.items()
    ]
    return _BASH.format(
        verbs=shlex.quote(" ".join(["--help", "--version", *VERBS])),
        values="\n".join(f"        {flag}) words={shlex.quote(' '.join(values[flag]))} ;;" for flag in values),
        flags="\n".join(flags),
    )


def _fish() -> str:
    summaries = {name: summary for verbs in GROUPS.values() for name, summary in verbs.items()}
    lines = []
    for name, verb in VERBS.items():
        lines.append(f"complete -c thinpipe -n __fish_use_subcommand -a {name} -d {_fish_quote(summaries[name])}")
        seen = f'-n "__fish_seen_subcommand_from {name}"'
        lines += [f"complete -c thinpipe {seen} -a {word}" for word in _positionals(verb)]
        for flag, choices in _flags(verb).items():
            values = f" -r -a {_fish_quote(' '.join(choices))}" if choices else " -r" * (flag not in _HELP)
            lines.append(f"complete -c thinpipe {seen} -l {flag.removeprefix('--')}{values}")
    return "\n".join(lines) + "\n"


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_HELP = {"--help": (), "--help-all": ()}


def _flags(verb: Verb) -> dict[str, tuple[str, ...]]:
    """Every flag, with its values if these are few."""
    flags: dict[str, tuple[str, ...]] = dict(_HELP)
    for entry in flags_of(verb.config):
        if not entry.positional:
            flags[f"--{entry.name}"] = entry.choices
    return flags


def _positionals(verb: Verb) -> list[str]:
    """Words that may stand for a positional argument, besides files."""
    presets = preset_names() if verb.starts_with_file else []
    return [*presets, *(word for entry in flags_of(verb.config) if entry.positional for word in entry.choices)]
