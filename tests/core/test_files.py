"""A file under its name is whole; whatever goes wrong while it is written leaves the old one and no litter."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from thinpipe.core.files import (
    AtomicFile,
    file_sha256,
    remove_durably,
    remove_partial_files,
    rename_durably,
    write_atomically,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_replaces_the_content_and_leaves_one_file(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    write_atomically(target, b"old")
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["state.json"]


def test_a_file_that_a_reader_has_open_is_replaced(tmp_path: Path) -> None:
    """On Windows once the reader has closed it, as virus scanners soon do."""
    target = tmp_path / "state.json"
    write_atomically(target, b"old")
    reader = target.open("rb")
    closing = threading.Timer(0.5, reader.close)
    closing.start()
    write_atomically(target, b"new")
    closing.join()
    assert target.read_bytes() == b"new"


def test_nothing_is_visible_before_the_commit(tmp_path: Path) -> None:
    file = AtomicFile(tmp_path / "state.json")
    file.write(b"half")
    assert not (tmp_path / "state.json").exists()
    file.commit()
    assert (tmp_path / "state.json").read_bytes() == b"half"


def test_an_error_in_the_block_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    write_atomically(target, b"old")

    def write_half() -> None:
        with AtomicFile(target) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["state.json"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_an_error_in_the_commit_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target = tmp_path / "state.json"
    write_atomically(target, b"old")

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="no"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["state.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
@pytest.mark.parametrize("limit_nbytes", [0, 1, 5_000, 99_999])
def test_a_full_disk_keeps_the_old_file(tmp_path: Path, limit_nbytes: int) -> None:
    target = tmp_path / "state.bin"
    write_atomically(target, b"old")
    code = f"""
import resource, signal
from pathlib import Path
from thinpipe.core.files import write_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing past the limit then fails with EFBIG
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_nbytes}, {limit_nbytes}))
try:
    write_atomically(Path({str(target)!r}), bytes(100_000))
except OSError:
    raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 7
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["state.bin"]


def test_two_writers_of_one_name_do_not_mix(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    first, second = AtomicFile(target), AtomicFile(target)
    first.write(b"first")
    second.write(b"second")
    second.commit()
    first.commit()
    assert target.read_bytes() == b"first"


def test_discard_after_commit_does_nothing(tmp_path: Path) -> None:
    file = AtomicFile(tmp_path / "state.json")
    file.commit()
    file.discard()
    assert names(tmp_path) == ["state.json"]


def test_partial_files_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_bytes(b"")
    (tmp_path / "mine.partial").write_bytes(b"")
    leftover = AtomicFile(tmp_path / "state.json")
    assert len(names(tmp_path)) == 3
    remove_partial_files(tmp_path)
    assert names(tmp_path) == [".hidden", "mine.partial"]
    leftover.discard()


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    remove_durably(tmp_path / "state.json")
    assert names(tmp_path) == []


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert file_sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_secret_is_never_readable_by_others(tmp_path):
    with AtomicFile(tmp_path / "key", mode=0o600) as file:
        file.write(b"secret")
        assert [path.stat().st_mode & 0o077 for path in tmp_path.iterdir()] == [0]
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


def test_a_written_file_gets_its_name(tmp_path):
    (tmp_path / "written").write_bytes(b"new")
    (tmp_path / "state").write_bytes(b"old")
    rename_durably(tmp_path / "written", tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == b"new"
    assert names(tmp_path) == ["state"]
