"""Parses a command line: the verb, and its settings with tyro, below them those of a settings file."""

import difflib
import re
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import tyro

from thinpipe.cli.commands import VERBS, Verb
from thinpipe.cli.help import short_help
from thinpipe.config.presets import preset_names, settings_file
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import load_toml, load_toml_below_flags
from thinpipe.core.errors import UserError

_NUMBERS = re.compile(r"\d+(,\d+)+")
_HELP, _HELP_ALL = ("--help", "-h"), "--help-all"


def parse(arguments: Sequence[str]) -> tuple[Verb, Any]:
    """The verb and its settings. Raises UserError if there is no such verb, or a settings file is missing or invalid,
    and SystemExit after printing a help or what is wrong with a flag."""
    name, *rest = arguments
    verb = VERBS.get(name)
    if verb is None:
        nearest = difflib.get_close_matches(name, VERBS, n=1)
        advice = f"did you mean {nearest[0]}? " if nearest else ""
        raise UserError(f"there is no command {name}: {advice}`thinpipe --help` names all")
    if verb.usual and any(argument in _HELP for argument in rest):
        named = rest[:1] if not rest[0].startswith("-") else []
        print(short_help(name, verb, *(load_toml(settings_file(file), verb.config) for file in named)))
        raise SystemExit(0)
    rest = ["--help" if argument == _HELP_ALL else argument for argument in rest]
    if not verb.starts_with_file or rest[:1] == ["--help"]:
        return verb, tyro.cli(verb.config, prog=f"thinpipe {name}", args=rest)
    if not rest or rest[0].startswith("-"):
        raise UserError(
            f"`thinpipe {name}` needs a settings file: thinpipe {name} RUN.toml [--section.field value]. "
            f"Presets in place of a file: {', '.join(preset_names())}; `thinpipe new` writes a file"
        )
    file, flags = settings_file(rest[0]), [flag for flag in rest[1:] if flag.startswith("--")]
    # Without flags, so that a message names the file.
    load = partial(load_toml_below_flags, flags=map(_settings_key, flags)) if flags else load_toml
    settings, given = load(file, verb.config), _with_separate_numbers(rest[1:])
    if isinstance(settings, RunConfig):
        given += _shorter_warmup(settings, given, flags=[_settings_key(flag) for flag in flags])
    return verb, tyro.cli(verb.config, default=settings, prog=f"thinpipe {name} {rest[0]}", args=given)


def _with_separate_numbers(arguments: Sequence[str]) -> list[str]:
    """--model.boundaries 1,2,3 is --model.boundaries 1 2 3."""
    return [part for each in arguments for part in (each.split(",") if _NUMBERS.fullmatch(each) else [each])]


def _shorter_warmup(settings: RunConfig, arguments: Sequence[str], *, flags: Sequence[str]) -> list[str]:
    """Arguments that make the warm-up a tenth of the steps where flags make the run of a file no longer than its
    warm-up, which is said. A warm-up that is a flag itself is left as it is, and refused if it does not fit.
    `settings`: of the file."""
    if "training.steps" not in flags or "lr_scheduler.warmup_steps" in flags:
        return []
    words = [word for argument in arguments for word in argument.split("=", 1)]
    number = next((after for word, after in pairwise(words) if word == "--training.steps"), "")
    shorter = settings.lr_scheduler.warmup_within(int(number)) if number.isdecimal() else None
    if shorter is None:
        return []
    fewer, sentence = shorter
    print(f"thinpipe: {sentence}", file=sys.stderr)
    return ["--lr-scheduler.warmup-steps", str(fewer)]


def _settings_key(flag: str) -> str:
    """--training.max-norm=2 and --job.no-print-config are training.max_norm and job.print_config."""
    *sections, name = flag.partition("=")[0].removeprefix("--").replace("-", "_").split(".")
    return ".".join((*sections, name.removeprefix("no_")))
