"""The pages: whole in themselves, true to the log, and safe whatever people call their peers."""

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from tests.report.logs import TOKENS, saved, settings, started, step, stopped, validated, write
from thinpipe.cli import main
from thinpipe.config.model import ProjectionConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.audit_events import CommitMeasured, LossRecomputed
from thinpipe.core.events import Retried, Skipped
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted, PeerAssignment, PeerJoined, PeerLeft
from thinpipe.report.summary import summarise

EVIL = '<script>alert("x")</script>&amp;'


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [
            value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "srcset", "action")
        ]

    def handle_data(self, data):
        self.text.append(data)


def report(folder, *arguments):
    """The page as a browser's parser sees it, and its Markdown."""
    assert main(["report", str(folder), *map(str, arguments)]) == 0
    page = (folder / "report/report.html").read_text()
    reader = Reader()
    reader.feed(page)
    return page, reader, (folder / "report/report.md").read_text()


@pytest.fixture
def many(tmp_path):
    """Three processes that were resumed twice; step 3 was lost and computed again."""
    return write(
        tmp_path / "many",
        started(),
        *(step(number, processes=3, memory=[5_000_000, 6_000_000, 7_000_000]) for number in (1, 2, 3)),
        saved(2),
        started(2, resumed_from="step-2", changed=["optimizer.lr 0.001 -> 0.002"]),
        Retried(
            step=3, culprit="loss", sender="process 1", boundary=0, forward=True, reason="is not finite", time_s=1e9
        ),
        *(step(number, processes=3, memory=[5_000_000, 6_000_000, 7_000_000]) for number in (3, 4)),
        Skipped(step=5, loss=None, culprit="loss"),
        validated(4, 3.25),
        stopped(5),
    )


def test_a_page_needs_nothing_else(many):
    page, reader, markdown = report(many)
    assert all(link.startswith("#") for link in reader.links), reader.links
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert reader.tags.count("svg") == 3
    assert "url(http" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', page)) <= set(ids)
    pictures = re.findall(r"!\[\w+\]\((\w+\.png)\)", markdown)
    assert sorted(pictures) == ["loss.png", "throughput.png", "time.png"]
    for picture in pictures:
        assert (many / "report" / picture).read_bytes().startswith(b"\x89PNG")


def test_its_numbers_are_those_of_the_log(many):
    page, reader, markdown = report(many)
    text = " ".join(" ".join(reader.text).split())
    for said in (
        f"has trained a model of 1,234 parameters for 4 of 80 steps on {4 * TOKENS} tokens, in 4.0 s",
        "The validation loss is 3.250 nats per token (1.625 bits per byte)",
        f"they sent 12.8 kB, {4 * 4 * TOKENS * 64 * 2 / 12800:.1f} times less",
        "It was started 2 times, computed 1 step(s) again, retried 1 step(s) and skipped 1 step(s). It is finished.",
        "training, mean of 1 steps around each",
        "optimizer.lr 0.001 -&gt; 0.002".replace("&gt;", ">"),
        "process 1 4.0 s 60% 20% 20% 6 MB",
        "0, states forward 6.2 128 0.01",
        "model.dim 64 none",
        "torch 2.13.0",
    ):
        assert said in text, said
    for row in ("| process 1 | 4.0 s | 60% | 20% | 20% | 6 MB |", "| model.dim | 64 | none |", "- tokens: **512**"):
        assert row in markdown, row
    assert "training.steps" in markdown
    assert "| debug.seed" not in markdown  # as it is by default
    assert "seed = 0" in page


def test_a_hub_run_names_its_peers_and_no_name_is_markup(tmp_path):
    places = [PeerAssignment(name=name, segments=[index]) for index, name in enumerate(("anna", EVIL))]
    run = write(
        tmp_path / "hub",
        PeerJoined(step=0, peer="anna"),
        PeerJoined(step=0, peer=EVIL),
        GenerationStarted(generation=1, step=0, peers=places),
        started(),
        *(step(number, processes=2) for number in (1, 2)),
        PeerLeft(step=2, peer=EVIL, cause="left", reason=f"{EVIL} left"),
        GenerationEnded(generation=1, step=2, peer=EVIL, cause="left", reason=f"{EVIL} left"),
        GenerationStarted(generation=2, step=2, peers=places[:1]),
        started(2),
        step(3),
    )
    page, reader, markdown = report(run)
    assert "<script" not in page
    assert "<script" not in markdown
    text = " ".join(" ".join(reader.text).split())
    assert f"{EVIL} left: regrouping from step 2" in text
    assert "peers joined 2 peers left 1 generations 2" in text
    assert "anna 3.0 s" in text
    assert f"{EVIL} 2.0 s" in text
    assert summarise(run).ended is None


def test_logs_of_other_versions_are_read_as_far_as_they_go(tmp_path):
    """The first logs had no links, no senders and no versions of what came later; later ones may have more."""
    run = tmp_path / "old"
    run.mkdir()
    (run / "events.jsonl").write_text(
        '{"event":"started","time_s":1.0,"step":0,"config":"[training]\\nsteps = 2\\n[gone]\\nold = 1\\n",'
        '"parameters":7,"versions":{}}\n'
        '{"event":"step","time_s":2.0,"step":1,"loss":3.0,"grad_norm":1.0,"lr":0.1,"tokens":10,"seconds":2.0,'
        '"tokens_per_second":5.0}\n'
        '{"event":"skipped","time_s":3.0,"step":2,"loss":null,"culprit":"blocks.0"}\n'
        '{"event":"retried","step":2}\n'
        '{"event":"from_the_future","step":3}\n'
        '{"event":"step","ti'
    )
    _, reader, markdown = report(run)
    text = " ".join(" ".join(reader.text).split())
    assert summarise(run).unknown == 2
    assert "2 line(s) of the log were written by another version" in text
    assert "| gone.old | 1 | none |" in markdown
    assert summarise(run).steps[-1].links == []


@pytest.mark.parametrize(
    "config", ["not [ TOML", "training = 1\nmodel = 2", "[model]\npreset = [1]\ndim = 'x'\nneck = 3\nsubspace = 'y'"]
)
def test_settings_that_a_peer_made_up_are_read_as_far_as_they_go(tmp_path, config):
    folder = write(tmp_path / "run", started(config=config), *(step(number, processes=2) for number in (1, 2)))
    _, reader, _ = report(folder)
    assert config.split()[0] in "".join(reader.text)


def test_runs_beside_each_other_show_what_the_difference_costs(many, tmp_path, capsys):
    other = write(tmp_path / "dense", started(), *(step(number) for number in range(1, 5)), validated(4, 3.0))
    _, reader, markdown = report(many, "--against", other)
    assert "| dense | +0.2500 (+8.33%) | 3.2500 | 3.0000 | 1.00 x |" in markdown
    assert "many against dense: validation loss after 512 tokens: 3.2500 against 3.0000" in capsys.readouterr().out
    assert "loss over time, mean of 1 steps around each" in " ".join(reader.text)
    assert (many / "report/comparison.png").is_file()


def test_projection_model_loads_with_its_code(many, tmp_path):
    config = dump_toml(settings(projection=ProjectionConfig(width=4)))
    run = write(tmp_path / "projection", started(config=config), step(1))
    _, _, markdown = report(run)
    assert 'from_pretrained("exported", trust_remote_code=True)' in markdown
    assert "4 numbers per token instead of 64 would cross each boundary" in markdown
    assert "trust_remote_code" not in report(many)[2]


def test_what_cannot_be_shown_is_said(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "name the dump_folder of a run" in capsys.readouterr().err
    write(tmp_path, started())
    assert main(["report", str(tmp_path)]) == 2
    assert "no step has been finished" in capsys.readouterr().err


def test_the_style_ships_with_the_package():
    import thinpipe.report

    assert (Path(thinpipe.report.__file__).parent / "page.css").is_file()


def test_a_report_tells_what_the_hub_recomputed(tmp_path):
    told = LossRecomputed(step=2, reported=4.98, recomputed=4.98, band=1e-3, peers=[EVIL], seconds=1.0)
    commit = CommitMeasured(
        step=1, loss=5.0, reported=4.99, expected_difference=None, margin=None, peers=[EVIL], seconds=1.0
    )
    run = write(tmp_path, started(), *map(step, (1, 2, 3)), told, commit)
    assert [event.is_disputed for event in summarise(run).recomputed] == [False]
    page = report(run)[2]
    assert "The hub computed 1 reported loss(es) again, of which 1 agree." in page
    write(tmp_path, msgspec.structs.replace(told, step=3, recomputed=9.0))
    page = report(run)[2]
    assert "of which 1 agree; ALARM: 1 event(s) show false reports" in page
    assert "and the hub computes 9.0000 from its commit" in page
