"""The command `thinpipe`: parses a verb's settings with tyro and calls the verb's function.

It holds no logic of any verb and imports no torch. Exit code 2 is a user error, reported as one message without a
traceback. Warnings of thinpipe's loggers are shown as one line on stderr, here for all commands and for the processes
that they launch, which are commands too.
"""

import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Union

import tyro

import thinpipe
from thinpipe.cli.commands import VERBS, Verb
from thinpipe.config.presets import preset_names, settings_file
from thinpipe.config.toml import load_toml, load_toml_below_flags
from thinpipe.core.errors import UserError
from thinpipe.core.extras import require_extra

DESCRIPTION = "Train language models over ordinary internet links. `thinpipe --version` prints the version."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (`sys.argv` by default) and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    replace_unknown_characters()
    if list(arguments) == ["--version"]:
        print(f"thinpipe {thinpipe.__version__}")
        return 0
    show_warnings()
    try:
        verb, config = _parse(arguments)
        if verb.swarm:
            require_extra("nats", extra="swarm", feature=f"thinpipe {arguments[0]}")
        if verb.check:
            _function(verb.check)(config)
        code: int | None = _function(verb.target)(config)
    except UserError as error:
        print(f"thinpipe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `thinpipe ... | head`; flushing stdout at exit must not raise it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _function(place: str) -> Callable[[Any], Any]:
    module, function = place.split(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    return found


def replace_unknown_characters() -> None:
    """Prints a question mark for a character that the encoding of stdout lacks, as cp1252 of a Windows pipe does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class _OneLine(logging.Handler):
    """Prints a record as one line on the stderr of the moment, which a progress bar may have redirected."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() if error is None else f"{record.getMessage()}: {type(error).__name__}: {error}"
        with suppress(OSError, ValueError):  # stderr is broken or closed: the code that logs goes on
            print(f"thinpipe: {' '.join(text.split())}", file=sys.stderr, flush=True)


def show_warnings() -> None:
    """Shows the warnings of all thinpipe loggers on stderr; repeated calls change nothing."""
    logger = logging.getLogger("thinpipe")
    if not any(isinstance(handler, _OneLine) for handler in logger.handlers):
        logger.addHandler(_OneLine(logging.WARNING))


def _parse(arguments: Sequence[str]) -> tuple[Verb, Any]:
    """The verb and its settings. Raises UserError if a settings file is missing or invalid."""
    name = arguments[0] if arguments else ""
    verb = VERBS.get(name)
    if verb is not None and verb.starts_with_file and arguments[1:2] not in (["--help"], ["-h"]):
        if len(arguments) < 2 or arguments[1].startswith("-"):
            raise UserError(
                f"`thinpipe {name}` needs a settings file: thinpipe {name} RUN.toml [--section.field value]. "
                f"Presets in place of a file: {', '.join(preset_names())}"
            )
        file, flags = settings_file(arguments[1]), [flag for flag in arguments[2:] if flag.startswith("--")]
        # Without flags, so that a message names the file.
        load = partial(load_toml_below_flags, flags=map(_settings_key, flags)) if flags else load_toml
        settings = load(file, verb.config)
        program = f"thinpipe {name} {arguments[1]}"
        return verb, tyro.cli(verb.config, default=settings, prog=program, args=arguments[2:])
    parsed = tyro.cli(parser_type(VERBS), prog="thinpipe", description=DESCRIPTION, args=arguments)
    return parsed.verb, parsed


def _settings_key(flag: str) -> str:
    """--training.max-norm=2 and --job.no-print-config are training.max_norm and job.print_config."""
    *sections, name = flag.partition("=")[0].removeprefix("--").replace("-", "_").split(".")
    return ".".join((*sections, name.removeprefix("no_")))


def parser_type(verbs: dict[str, Verb]) -> Any:
    """Union of settings classes from which tyro makes subcommands."""
    members = (Annotated[_config_with_verb(verb), tyro.conf.subcommand(name)] for name, verb in verbs.items())
    # tyro makes subcommands only for a union, and a union of one type is that type: hence a hidden second member.
    return Union[(*members, Annotated[None, tyro.conf.Suppress])]


def _config_with_verb(verb: Verb) -> type[Any]:
    """Subclass of the verb's settings with the attribute `verb`, so that two verbs can share a settings class."""
    return type(verb.config.__name__, (verb.config,), {"__doc__": verb.config.__doc__, "verb": verb})
