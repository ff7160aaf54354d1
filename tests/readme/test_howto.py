"""docs/howto/train-with-friends.md: its file is the example's, and its hub is the one that the page describes."""

import tomllib

from tests.readme.pages import ROOT, commands, save_files
from thinpipe.cli.parsing import parse
from thinpipe.config.hub import HubConfig

PAGE = ROOT / "docs/howto/train-with-friends.md"


def test_the_run_file_is_the_example(tmp_path):
    save_files(PAGE, tmp_path)
    saved = tomllib.loads((tmp_path / "friends.toml").read_text())
    assert saved == tomllib.loads((ROOT / "examples/friends.toml").read_text())


def test_the_hub_does_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_files(PAGE, tmp_path)
    (hub,) = (words for words in commands(PAGE) if words[0] == "hub")
    _, config = parse(hub)
    assert isinstance(config, HubConfig)
    assert config.hub.peers == len(config.model.boundaries) + 1
    assert config.microbatches >= config.hub.peers
