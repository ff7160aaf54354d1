"""The command `thinpipe`: parses a verb's settings with tyro and calls the verb's function.

It holds no logic of any verb and imports no torch. Exit code 2 means that what was asked for makes no sense, and comes
with one message and no traceback.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import tyro

from thinpipe import __version__
from thinpipe.cli.verbs import GROUPS, VERBS, Verb
from thinpipe.core.config import load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.extras import need
from thinpipe.train.shipped import settings_file, shipped

DESCRIPTION = "Train language models over ordinary internet links. `thinpipe --version` prints the version."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (that of the process by default) and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"thinpipe {__version__}")
        return 0
    try:
        verb, config = _parse(arguments)
        if verb.swarm:
            need("nats", extra="swarm", what=f"thinpipe {arguments[0]}")
        module, function = verb.target.split(":")
        code: int | None = getattr(importlib.import_module(module), function)(config)
    except UserError as error:
        print(f"thinpipe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `thinpipe ... | head` has seen enough; what is still buffered must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _parse(arguments: Sequence[str]) -> tuple[Verb, Any]:
    name = arguments[0] if arguments else ""
    verb = VERBS.get(name)
    if verb is not None and verb.starts_with_file and arguments[1:2] not in (["--help"], ["-h"]):
        if len(arguments) < 2 or arguments[1].startswith("-"):
            raise UserError(
                f"{name} starts from a file with settings: thinpipe {name} RUN.toml [--section.field value], "
                f"or from one that comes with thinpipe: {', '.join(map(repr, shipped()))}"
            )
        settings = load_toml(settings_file(arguments[1]), verb.config)
        program = f"thinpipe {name} {arguments[1]}"
        return verb, tyro.cli(verb.config, default=settings, prog=program, args=arguments[2:])
    parsed = tyro.cli(parser_type(VERBS), prog="thinpipe", description=DESCRIPTION, args=arguments)
    return parsed.verb, parsed


def parser_type(verbs: dict[str, Verb]) -> Any:
    """The nested union of settings from which tyro makes verbs and sub-verbs."""
    members: dict[str, Any] = {}
    for name, verb in verbs.items():
        group, _, last = name.rpartition(" ")
        target = members.setdefault(group, {}) if group else members
        target[last] = Annotated[_remembering(verb), tyro.conf.subcommand(last)]
    for name, member in members.items():
        if isinstance(member, dict):
            members[name] = Annotated[_union(member), tyro.conf.subcommand(name, description=GROUPS[name])]
    return _union(members)


def _union(members: dict[str, Any]) -> Any:
    # tyro shows verbs for a union only, and a union of one type is that type: hence a hidden second member.
    return Union[(*members.values(), Annotated[None, tyro.conf.Suppress])]


def _remembering(verb: Verb) -> type[Any]:
    """The verb's settings in a class that knows its verb, so that two verbs may share their settings."""
    return type(verb.config.__name__, (verb.config,), {"__doc__": verb.config.__doc__, "verb": verb})
