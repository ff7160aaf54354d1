import errno
import os
import socket
import subprocess
import sys
import time

import pytest

from thinpipe.core import folder_lock as lock
from thinpipe.core.errors import UserError
from thinpipe.core.folder_lock import FolderLock


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.2)


def test_one_at_a_time(tmp_path):
    first = FolderLock(tmp_path)
    with pytest.raises(UserError, match="in use by another hub"):
        FolderLock(tmp_path)
    first.release()
    FolderLock(tmp_path).release()


def test_who_is_second_is_told_whom_to_stop(tmp_path):
    first = FolderLock(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} is in use by a friend: ask him"):
        FolderLock(tmp_path, in_use_by="a friend: ask him")
    first.release()


@pytest.mark.skipif(sys.platform == "win32", reason="locks are not inherited on Windows")
def test_who_inherits_it_keeps_it(tmp_path):
    held = FolderLock(tmp_path)
    heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=held.inheritable)
    held.release()
    with pytest.raises(UserError, match="a server one has left behind"):
        FolderLock(tmp_path)
    heir.communicate(b"\n", timeout=300)
    FolderLock(tmp_path).release()


def test_a_program_that_runs_is_named_at_once_and_one_that_has_ended_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 600.0)
    held = FolderLock(tmp_path)
    began = time.monotonic()
    with pytest.raises(UserError, match="is in use by"):
        FolderLock(tmp_path)
    assert time.monotonic() - began < 60
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(300)
    held._write_holder(f"{socket.gethostname()} {ended.pid}")
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.2)
    with pytest.raises(UserError, match="is in use by"):
        FolderLock(tmp_path)
    held.release()
    FolderLock(tmp_path).release()


def test_one_that_is_let_go_soon_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 10.0)
    held = FolderLock(tmp_path)
    held._write_holder("another-machine 1")
    monkeypatch.setattr(lock.time, "sleep", lambda _: held.release())
    FolderLock(tmp_path).release()


@pytest.mark.skipif(sys.platform == "win32", reason="flock is POSIX's")
def test_a_file_system_without_locks_is_not_in_use(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
        FolderLock(tmp_path)


def test_a_lock_that_may_not_be_opened_is_said(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(lock.os, "open", refuse)  # root may open anything
    with pytest.raises(UserError, match="lock may not be opened: choose another folder"):
        FolderLock(tmp_path)
