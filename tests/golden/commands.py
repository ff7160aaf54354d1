"""Runs commands of thinpipe one after the other in one process, because starting one costs seconds.

`python -m tests.golden.commands COMMANDS` takes a JSON list of lists of words and prints a JSON list of what
each of them printed.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from tests.golden.environment import run_module
from thinpipe.cli import main


def run_commands(folder: Path, *commands: list[str]) -> list[str]:
    """In the pinned environment and in this folder; what each command printed."""
    return json.loads(run_module("tests.golden.commands", json.dumps(commands), folder=folder).splitlines()[-1])


def run_here(commands: list[list[str]]) -> list[str]:
    printed = []
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code = main(command)
        if code:
            sys.exit(f"thinpipe {' '.join(command)} ended with {code}: {output.getvalue()}")
        printed.append(output.getvalue())
    return printed


if __name__ == "__main__":
    print(json.dumps(run_here(json.loads(sys.argv[1]))))
