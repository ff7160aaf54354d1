"""Small disks that can be filled: a file with a file system in it, mounted on a folder. Linux and root only.

They stay when a run is broken off, and are mounted again when it goes on.
"""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.netns.namespaces import run

MEBIBYTES = 1536
"""Size of a small disk: all checkpoints that a peer keeps, and the gigabyte that a standby leaves free. The file of the
disk is sparse."""
_BALLAST = "ballast"


def missing() -> str | None:
    """Why there can be no small disks here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "small disks need Linux and root"
    if not (shutil.which("mkfs.ext4") and shutil.which("mount")):
        return "small disks need `mkfs.ext4` and `mount`: apt-get install e2fsprogs mount"
    try:
        with tempfile.TemporaryDirectory() as folder:
            mount(Path(folder) / "disk")
            unmount(Path(folder) / "disk")
    except subprocess.CalledProcessError as error:
        return f"this kernel does not let us mount a file: {error.stderr.strip()}"
    return None


def mount(folder: Path) -> None:
    """The disk is in a file beside the folder; nothing happens if it is mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_mount():
        return
    image = folder.with_name(f"{folder.name}.img")
    if not image.exists():
        partial = image.with_suffix(".partial")
        partial.write_bytes(b"")
        os.truncate(partial, MEBIBYTES << 20)
        run("mkfs.ext4", "-q", "-m", "0", str(partial))
        partial.rename(image)
    run("mount", "-o", "loop", str(image), str(folder))


def unmount(folder: Path) -> None:
    if folder.is_mount():
        run("umount", "-l", str(folder))


def fill(folder: Path) -> None:
    """To the last block. Room is taken, not written, so that it is quick."""
    with (folder / _BALLAST).open("wb", buffering=0) as file:
        nbytes = shutil.disk_usage(folder).free
        while nbytes:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, nbytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                nbytes //= 2


def empty(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        (folder / _BALLAST).unlink()
