"""The wheel in environments that have what it says it needs and nothing else: without extras, and with them.

Nothing is downloaded: libraries are links to those of this environment, and `pip check` says whether any is missing.
"""

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.libraries import constraints, known_good, needed, users_requirements
from tests.readme.pages import ROOT, blocks, commands, marked

RUN = """
[data]
path = "tokens"
[training]
steps = 2
global_batch_size = 2
seq_len = 32
[lr_scheduler]
warmup_steps = 1
[validation]
steps = 1
"""


def call(*command, folder, status=0):
    done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def link_library(name, site):
    """Into another environment."""
    found = distribution(name)
    for top in {Path(file).parts[0] for file in found.files} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(found.locate_file(top)))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def environment(folder, wheel, extras=()):
    """Returns where its programs are."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin/python")
    call(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, folder=folder)
    (metadata,) = site.glob("thinpipe-*.dist-info/METADATA")
    lines = [
        line.partition(": ")[2] for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist: ")
    ]
    for name in needed(lines, extras=extras):
        link_library(name, site)
    call(*pip, "check", folder=folder)
    return folder / "bin"


def test_the_index_will_read_both(built):
    assert call(sys.executable, "-m", "twine", "check", "--strict", *built, folder=built[0].parent).count("PASSED") == 2


def test_the_sdist_has_all_that_is_kept_but_results(built):
    """So that tests can be run and the site be made from it."""
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    assert {"PKG-INFO", "README.md", "LICENSE", "CITATION.cff", "Dockerfile", "compose.yaml", "known-good.txt"} <= names
    assert {".ci/constraints.txt", ".github/workflows/release.yml", "docs/make_site.py", "docs/overview.png"} <= names
    assert {"tests/packaging/test_wheel.py", "examples/quickstart.toml", "benchmarks/overview.py"} <= names
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|^(runs|joined|tokens|build|dist)/", name)]
    tops = {name.partition("/")[0] for name in names}
    assert tops <= {path.name for path in ROOT.iterdir()} | {"PKG-INFO"}


def test_the_wheel_has_the_package_alone(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    package = {name for name in names if ".dist-info/" not in name}
    sources = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert package == {path.relative_to(ROOT / "src").as_posix() for path in sources}
    assert {name.partition("/")[0] for name in package} == {"thinpipe"}
    assert {"thinpipe/py.typed", "thinpipe/monitor/page.html", "thinpipe/data/sample/train-alice.txt"} <= package
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "Project-URL: Homepage, https://github.com/thinpipe/thinpipe" in metadata.splitlines()
    assert re.search(r"^License-Expression: Apache-2.0$", metadata, re.MULTILINE)


def test_known_good_versions_are_those_of_ci_and_within_the_ranges():
    assert (ROOT / "known-good.txt").read_text() == known_good(), "run: python -m tests.packaging.libraries"
    pinned = {name: Version(line.partition("==")[2]) for name, line in constraints().items()}
    for wanted in map(Requirement, users_requirements()):
        assert pinned[wanted.name.lower().replace("_", "-")] in wanted.specifier, wanted


@pytest.mark.timeout(900)
def test_without_extras_it_trains_and_says_what_is_missing(built, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    thinpipe = environment(tmp_path / "bare", built[1]) / "thinpipe"
    assert "tokenize" in call(thinpipe, "--help", folder=tmp_path)
    text = ("--sources", "sample:train", "--validation-sources", "sample:validation")
    call(thinpipe, "tokenize", *text, "--vocab-size", "512", "--output", "tokens", folder=tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    assert "finished" in call(thinpipe, "train", "run.toml", folder=tmp_path)
    (tmp_path / "text.parquet").write_bytes(b"PAR1")
    said = call(thinpipe, "tokenize", "--sources", "text.parquet", "--output", "more", folder=tmp_path, status=2)
    assert 'needs pyarrow: pip install "thinpipe[parquet]" (in a clone: pip install -e ".[parquet]")' in " ".join(
        said.split()
    )
    said = call(thinpipe, "join", "thinpipe3:...", folder=tmp_path, status=2)
    assert 'thinpipe join needs nats: pip install "thinpipe[swarm]"' in said


@pytest.mark.timeout(900)
def test_with_extras_it_speaks_to_hubs_and_draws(built, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    programs = environment(tmp_path / "full", built[1], extras=("swarm", "report", "parquet", "hf"))
    assert "an invite begins with" in call(programs / "thinpipe", "join", "hello", folder=tmp_path, status=2)
    files = (ROOT / "examples/friends.toml", "--machines", ROOT / "examples/machines.toml")
    call(programs / "thinpipe", "plan", *files, "--figure", "step.png", folder=tmp_path)
    assert (tmp_path / "step.png").stat().st_size > 10_000


FEW_STEPS = ("--training.steps", "4", "--lr-scheduler.warmup-steps", "2")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_wheel_runs_all_commands_of_the_readme(built, tmp_path, monkeypatch):
    """Those that train, with fewer steps. `hub`, `join`, `status` and `new` need people and have tests of their own."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    programs = environment(tmp_path / "full", built[1], extras=("swarm", "report", "hf"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = ROOT / "README.md"
    plan = ["thinpipe", *next(words for words in commands(page) if words[0] == "plan")]
    sections = ("quick start", "quick start, after", "keel", "friends")
    for _, verb, *words in [*(line for name in sections for line in marked(page, name)), plan]:
        fewer = FEW_STEPS if verb in ("train", "up") else ()
        call(programs / "thinpipe", verb, *words, *fewer, folder=tmp_path)
    for block in (block for block in blocks(page) if block.language == "python"):
        call(programs / "python", "-c", block.text.replace('"steps": 100', '"steps": 41'), folder=tmp_path)
    others = {words[0] for words in commands(page)} - {
        "tokenize",
        "train",
        "generate",
        "report",
        "export",
        "up",
        "plan",
    }
    assert others == {"hub", "join", "new", "status"}


def test_the_dockerfile_copies_what_exists():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert copied
    assert all((ROOT / name).exists() for names in copied for name in names)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {name for names in copied for name in names}
