"""The version is that of the newest tag, of a commit since then, or, where nobody knows, of the next release."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import thinpipe
from tests.readme.pages import ROOT

NEXT = "0.2.0.dev0"


@pytest.fixture
def sources(tmp_path):
    """What hatchling needs to tell a version, in a folder without git."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src/thinpipe").mkdir(parents=True)
    (tmp_path / "src/thinpipe/__init__.py").write_bytes((ROOT / "src/thinpipe/__init__.py").read_bytes())
    return tmp_path


def run(*command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def version_in(folder):
    return run(sys.executable, "-m", "hatchling", "version", folder=folder)


def git(folder, *words):
    author = ("-c", "user.name=a", "-c", "user.email=a@example.net")
    return run("git", *author, *words, folder=folder)


def test_a_source_archive_is_of_the_next_release(sources):
    assert version_in(sources) == NEXT


def test_a_clone_is_of_its_newest_tag(sources):
    git(sources, "init", "--quiet")
    git(sources, "add", ".")
    git(sources, "commit", "--quiet", "-m", "first")
    commit = git(sources, "rev-parse", "--short=7", "HEAD")
    assert re.fullmatch(rf"0\.2\.0\.dev1\+g{commit}\w*", version_in(sources)), "without tags"
    git(sources, "tag", "v0.2.0")
    assert version_in(sources) == "0.2.0"
    git(sources, "commit", "--quiet", "--allow-empty", "-m", "second")
    assert version_in(sources).startswith("0.2.1.dev1+g")
    git(sources, "tag", "unrelated")
    assert version_in(sources).startswith("0.2.1.dev1+g")


def test_sources_that_are_not_installed_have_a_version():
    script = "import sys; sys.path.insert(0, sys.argv[1]); import thinpipe; print(thinpipe.__version__)"
    folder = str(Path(thinpipe.__file__).parents[1])
    assert run(sys.executable, "-I", "-S", "-c", script, folder, folder=folder) == NEXT


def test_the_next_version_is_the_same_everywhere():
    fallback = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["fallback-version"]
    assert fallback == thinpipe._VERSION_NOT_INSTALLED == NEXT
    assert f"ARG VERSION={NEXT}\n" in (ROOT / "Dockerfile").read_text()
