"""Quiet is quiet, and the bar appears on a terminal only."""

import contextlib
import os
import subprocess
import sys

import pytest

from thinpipe.data import no_progress, progress_bar

CODE = """
from thinpipe.data import progress_bar
with progress_bar("tokenizing", 1000) as advance:
    advance(400)
    advance(600)
with progress_bar("unknown size", None) as advance:
    advance(5)
"""


def test_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    for progress in (no_progress, progress_bar):  # stderr is no terminal here
        with progress("label", 10) as advance:
            advance(10)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_a_bar_on_a_terminal() -> None:
    import pty

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    output = b""
    with subprocess.Popen([sys.executable, "-c", CODE], stderr=theirs, env=environment) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed; others give no bytes
            while part := os.read(ours, 65536):
                output += part
        assert process.wait(timeout=600) == 0
    os.close(ours)
    for shown in (b"tokenizing", b"1.0/1.0 kB", b"ETA", b"unknown size", b"5/? bytes"):
        assert shown in output
