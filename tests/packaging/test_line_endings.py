"""A clone by Git for Windows, which by default turns line ends into CR LF, has the bytes of any other clone."""

import os
import subprocess

import pytest

from tests.readme.pages import ROOT
from thinpipe.core.files import file_sha256


def clone(source, folder, *, autocrlf):
    """Returns the sha256 of every file."""
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ("git", "-c", f"core.autocrlf={autocrlf}", "clone", "--quiet", "--shared", str(source), str(folder))
    subprocess.run(command, check=True, timeout=300, env=environment)
    files = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.relative_to(folder).parts)
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source archive has no history to clone")
def test_a_clone_with_autocrlf_equals_an_ordinary_one(tmp_path):
    ordinary = clone(ROOT, tmp_path / "ordinary", autocrlf="false")
    assert "src/thinpipe/__init__.py" in ordinary
    assert clone(ROOT, tmp_path / "windows", autocrlf="true") == ordinary


def test_without_attributes_it_would_differ(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_bytes(b"a = 1\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.net")
    for words in (("init", "--quiet"), ("add", "a.py"), (*author, "commit", "--quiet", "-m", "a")):
        subprocess.run(("git", *words), cwd=source, check=True)
    copies = [clone(source, tmp_path / autocrlf, autocrlf=autocrlf) for autocrlf in ("true", "false")]
    assert copies[0] != copies[1]
