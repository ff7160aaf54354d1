"""docs/reference is what docs/reference/make.py makes of today's settings, and says something of each."""

import subprocess
import sys
from pathlib import Path

import pytest

import thinpipe
from tests.readme.pages import program
from thinpipe.cli.commands import VERBS
from thinpipe.config.describe import flags_of

REFERENCE = Path(__file__).parents[2] / "docs/reference"


@pytest.fixture(scope="module")
def make():
    with program(REFERENCE / "make.py") as module:
        yield module


@pytest.mark.parametrize("name", ["settings.md", "commands.md", "api.md"])
def test_the_page_is_not_stale(make, name):
    assert (REFERENCE / name).read_text() == make.PAGES[name](), "run: python docs/reference/make.py"


def test_every_setting_says_what_it_does():
    silent = [f"{verb}: {entry.name}" for verb in VERBS for entry in flags_of(VERBS[verb].config) if not entry.help]
    assert not silent


def test_every_public_name_is_on_the_page_of_the_api(make):
    assert sorted(name for names in make.API.values() for name in names) == sorted(thinpipe.__all__)
    page = make.api_page()
    assert "### `CompressedStage`" in page
    assert "train(config: RunConfig | Path | str, *, callbacks:" in page
    assert "- `stop_reason`: `str | None`: Why training ended" in page


def test_a_section_shows_the_defaults_that_it_has_where_it_stands(make):
    assert "| `--reconnect-timeout-seconds` | number | `600.0` |" in make.commands_page()


def test_a_key_is_found_with_its_type_default_and_help(make):
    page = make.settings_page()
    assert "| `backward` | `fp32`, `bf16`, `int8`, `int4` | `fp32` | Number format of gradients." in page
    assert "## `[boundary.gradients]`" in page


def test_it_needs_no_torch():
    script = "import sys, runpy; runpy.run_path(sys.argv[1]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script, str(REFERENCE / "make.py")], check=True, timeout=120)
