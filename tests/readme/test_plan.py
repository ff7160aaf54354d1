"""The plans of the how-to are asked for as they stand."""

from tests.readme.pages import ROOT, marked
from thinpipe.cli import main


def test_every_plan_is_answered(tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for program, *arguments in marked(ROOT / "docs/howto/plan.md", "plan"):
        assert program == "thinpipe"
        assert main(arguments) == 0
        assert "tokens/s" in capsys.readouterr().out
    assert (tmp_path / "step.png").stat().st_size > 10_000
