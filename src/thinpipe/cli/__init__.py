"""The command `thinpipe`: parses a verb's settings with tyro and calls the verb's function.

It holds no logic of any verb and imports no torch. Exit code 2 is a user error, reported as one message without a
traceback.
"""

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import tyro

from thinpipe import __version__
from thinpipe.cli.commands import VERBS, Verb
from thinpipe.config.presets import preset_names, settings_file
from thinpipe.config.toml import load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.extras import require_extra

DESCRIPTION = "Train language models over ordinary internet links. `thinpipe --version` prints the version."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (`sys.argv` by default) and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"thinpipe {__version__}")
        return 0
    _show_warnings()
    try:
        verb, config = _parse(arguments)
        if verb.swarm:
            require_extra("nats", extra="swarm", what=f"thinpipe {arguments[0]}")
        module, function = verb.target.split(":")
        code: int | None = getattr(importlib.import_module(module), function)(config)
    except UserError as error:
        print(f"thinpipe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `thinpipe ... | head`; flushing stdout at exit must not raise it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


class _StderrLines(logging.Handler):
    """Shows each log record as one line on stderr, without a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"thinpipe: {record.getMessage()}", file=sys.stderr)


def _show_warnings() -> None:
    """Shows the warnings and errors that thinpipe's modules log; other libraries' loggers stay as they are."""
    logger = logging.getLogger("thinpipe")
    if not any(isinstance(handler, _StderrLines) for handler in logger.handlers):
        logger.addHandler(_StderrLines(logging.WARNING))


def _parse(arguments: Sequence[str]) -> tuple[Verb, Any]:
    """The verb and its settings. Raises UserError if a settings file is missing or invalid."""
    name = arguments[0] if arguments else ""
    verb = VERBS.get(name)
    if verb is not None and verb.starts_with_file and arguments[1:2] not in (["--help"], ["-h"]):
        if len(arguments) < 2 or arguments[1].startswith("-"):
            raise UserError(
                f"{name} starts from a file with settings: thinpipe {name} RUN.toml [--section.field value], "
                f"or from one that comes with thinpipe: {', '.join(map(repr, preset_names()))}"
            )
        settings = load_toml(settings_file(arguments[1]), verb.config)
        program = f"thinpipe {name} {arguments[1]}"
        return verb, tyro.cli(verb.config, default=settings, prog=program, args=arguments[2:])
    parsed = tyro.cli(parser_type(VERBS), prog="thinpipe", description=DESCRIPTION, args=arguments)
    return parsed.verb, parsed


def parser_type(verbs: dict[str, Verb]) -> Any:
    """Union of settings classes from which tyro makes subcommands."""
    members = (Annotated[_config_with_verb(verb), tyro.conf.subcommand(name)] for name, verb in verbs.items())
    # tyro makes subcommands only for a union, and a union of one type is that type: hence a hidden second member.
    return Union[(*members, Annotated[None, tyro.conf.Suppress])]


def _config_with_verb(verb: Verb) -> type[Any]:
    """Subclass of the verb's settings with the attribute `verb`, so that two verbs can share a settings class."""
    return type(verb.config.__name__, (verb.config,), {"__doc__": verb.config.__doc__, "verb": verb})
