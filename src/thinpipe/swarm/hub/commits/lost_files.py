"""Finds files of the newest checkpoint that were lost at the hub, and sets aside a checkpoint that cannot be repaired.

Peers keep their part of every commit until the hub has a newer one, so they can upload lost files again.
"""

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Checkpoint
from thinpipe.checkpoint.storage import layer_of
from thinpipe.core.files import file_sha256, replace, sync_folder, write_atomically
from thinpipe.core.run_folder import MANIFEST
from thinpipe.core.units import format_names

_LOG = logging.getLogger(__name__)
_CORRUPT_SUFFIX, _LOST_PREFIX = ".corrupt", "lost-"
_MAX_NAMED = 3


def find_missing(checkpoint: Checkpoint) -> dict[str, str]:
    """Reads every file of the checkpoint; returns the sha256 of the missing or corrupt ones, by file name. A corrupt
    file is renamed, so that a good one can take its place; a missing manifest is written again."""
    missing: dict[str, str] = {}
    try:
        if not (checkpoint.path / MANIFEST).exists():
            restore_manifest(checkpoint)
    except OSError:  # tried again at the next verification
        _LOG.warning("the manifest of %s cannot be restored", checkpoint.path, exc_info=True)
    for name, entry in checkpoint.manifest.files.items():
        path = checkpoint.path / name
        with suppress(OSError):  # an unreadable file counts as missing
            if path.stat().st_size == entry.nbytes and file_sha256(path) == entry.sha256:
                continue
        missing[name] = entry.sha256
        with suppress(OSError):
            replace(path, path.with_name(path.name + _CORRUPT_SUFFIX))
    return missing


def restore_manifest(checkpoint: Checkpoint) -> None:
    """Writes the manifest again, and creates the checkpoint's folder if needed."""
    checkpoint.path.mkdir(parents=True, exist_ok=True)
    write_atomically(checkpoint.path / MANIFEST, msgspec.json.format(msgspec.json.encode(checkpoint.manifest)))
    sync_folder(checkpoint.path.parent)


def set_aside(checkpoint: Checkpoint) -> Path:
    """Renames the folder of a checkpoint given up, so that its remaining files can be recovered by hand. Returns its
    path."""
    place = checkpoint.path.with_name(_LOST_PREFIX + checkpoint.path.name)
    number = 1
    while place.exists():
        number += 1
        place = checkpoint.path.with_name(f"{_LOST_PREFIX}{checkpoint.path.name}-{number}")
    replace(checkpoint.path, place)
    return place


def describe_missing_files(
    step: int, holders: Mapping[str, Collection[str]], present: Collection[str], absent: Collection[str]
) -> str:
    """The missing files and their holders, for people. `holders`: peers by missing file.

    For example "the hub has lost blocks.3 of step 120 (copies at carol, not connected)".
    """
    names = sorted(map(layer_of, holders))
    shown = format_names(names, _MAX_NAMED)
    known = sorted({name for names in holders.values() for name in names})
    gone = [name for name in known if name not in present]
    if gone:
        who = f"copies at {', '.join(gone)}, not connected"
    elif known:
        who = f"copies at {', '.join(known)}"
    else:
        who = f"no known copy; peers that are not connected: {', '.join(sorted(absent)) or 'none'}"
    return f"the hub has lost {shown} of step {step} ({who})"
