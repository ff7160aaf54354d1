"""Files of the hub's newest checkpoint that were lost at the hub: which they are, and what to do when nobody has them.

Peers keep their part of every commit until the hub has a newer one, so what the hub has lost can be given again.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Checkpoint
from thinpipe.checkpoint.folder import MANIFEST, layer_of
from thinpipe.core.files import file_sha256, sync_folder, write_atomically

_ROTTEN, _LOST = ".rotten", "lost-"
_MOST_NAMED = 3


def find_missing(checkpoint: Checkpoint) -> dict[str, str]:
    """Reads every file. What is rotten gets another name, so that a good one can take its place; the manifest, which we
    know, is put back by us."""
    missing: dict[str, str] = {}
    with suppress(OSError):  # the next look tries again
        if not (checkpoint.path / MANIFEST).exists():
            put_back_manifest(checkpoint)
    for name, entry in checkpoint.manifest.files.items():
        path = checkpoint.path / name
        with suppress(OSError):  # what cannot be read is missing
            if path.stat().st_size == entry.nbytes and file_sha256(path) == entry.sha256:
                continue
        missing[name] = entry.sha256
        with suppress(OSError):
            path.rename(path.with_name(path.name + _ROTTEN))
    return missing


def put_back_manifest(checkpoint: Checkpoint) -> None:
    """Also its folder."""
    checkpoint.path.mkdir(parents=True, exist_ok=True)
    write_atomically(checkpoint.path / MANIFEST, msgspec.json.format(msgspec.json.encode(checkpoint.manifest)))
    sync_folder(checkpoint.path.parent)


def set_aside(checkpoint: Checkpoint) -> Path:
    """What is left of it may help somebody who looks for it by hand."""
    place = checkpoint.path.with_name(_LOST + checkpoint.path.name)
    number = 1
    while place.exists():
        number += 1
        place = checkpoint.path.with_name(f"{_LOST}{checkpoint.path.name}-{number}")
    checkpoint.path.rename(place)
    return place


def say_missing(
    step: int, holders: Mapping[str, Collection[str]], present: Collection[str], away: Collection[str]
) -> str:
    """`holders`: of what is missing. "step 120 of blocks.3 is lost at the hub; it was held by carol, who is away"."""
    names = sorted(map(layer_of, holders))
    shown = ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )
    known = sorted({name for names in holders.values() for name in names})
    gone = [name for name in known if name not in present]
    if gone:
        who = f"held by {', '.join(gone)}, who {'is' if len(gone) == 1 else 'are'} away"
    elif known:
        who = f"held by {', '.join(known)}"
    else:
        who = f"not known who held it; away: {', '.join(sorted(away)) or 'nobody'}"
    return f"step {step} of {shown} is lost at the hub ({who})"
