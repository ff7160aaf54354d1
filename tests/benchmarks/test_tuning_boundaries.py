"""The study of boundaries while tuning: its task, its runs, its records and the table made of them."""

import itertools
import json
import re

import pytest

from benchmarks.convergence.execute import is_done, result_path, settings_of
from benchmarks.tuning_boundaries.record import data_sha256, has_base, refuse_other_bases
from benchmarks.tuning_boundaries.report import page, read_results
from benchmarks.tuning_boundaries.runs import BOUNDARIES, FULL, SEEDS, WHOLE, Base, core_minutes, runs, smoke_runs
from benchmarks.tuning_boundaries.task import dialogues, make_task
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.data import ShardWriter, Tokenizer, Tokens, Windows
from thinpipe.models import build


@pytest.fixture
def source(tmp_path):
    """Books as `thinpipe tokenize` leaves them."""
    text = "Once upon a time there was a house by the sea. " * 200
    tokenizer = Tokenizer.train([text], vocab_size=270)
    tokenizer.save(tmp_path / "source" / "tokenizer")
    for side in ("train", "validation"):
        with ShardWriter(tmp_path / "source" / side, tokenizer.vocabulary, source="a book") as writer:
            writer.add(*tokenizer.encode_batch([text]), text_nbytes=len(text))
            writer.finish()
    return tmp_path / "source"


def test_dialogues_are_those_of_their_seed_and_answers_are_right():
    first, again, other = (list(itertools.islice(dialogues(seed), 200)) for seed in (0, 0, 1))
    assert first == again != other
    found = re.findall(r"(\d+) (plus|minus) (\d+) is (-?\d+)\.", "".join(first))
    assert len(found) > 50
    for left, word, right, result in found:
        assert int(result) == (int(left) + int(right) if word == "plus" else int(left) - int(right))
    for program, printed in re.findall(r"\n(. = .*?\n.*?\n.*?)\n<assistant>\nIt prints (.*?)\.", "".join(first)):
        seen: list[int] = []
        exec(program, {"print": seen.append, "range": range})
        assert printed == ", ".join(map(str, seen))


def test_the_task_has_the_samples_of_the_runs_and_other_dialogues_in_validation(source, tmp_path):
    make_task(source, tmp_path / "task", seq_len=32, samples=40, validation_samples=10)
    train, validation = (Tokens(tmp_path / "task" / side) for side in ("train", "validation"))
    assert 40 <= len(Windows(train, 32)) <= 45
    assert 10 <= len(Windows(validation, 32)) <= 15
    tokenizer = Tokenizer.load(source / "tokenizer")
    learnt, asked = (tokenizer.decode(tokens.read(0, 200).tolist()) for tokens in (train, validation))
    assert learnt.startswith("<user>")
    assert asked.startswith("<user>")
    assert learnt != asked


def test_settings_of_every_run_survive_the_file_they_are_given_in(tmp_path):
    every = [Base(), *runs(), *smoke_runs()]
    assert len({(run.key, run.steps) for run in every}) == len(every)
    for run in every:
        config = run.config(tmp_path, tmp_path / run.key)
        (tmp_path / "run.toml").write_text(dump_toml(config))
        assert load_toml(tmp_path / "run.toml", RunConfig) == config


def test_sizes_are_those_that_the_command_states():
    weights = sum(parameter.numel() for parameter in build(FULL.model.resolve(4096)).parameters())
    assert 10_000_000 < weights < 12_000_000
    assert core_minutes(Base()) < 40
    assert max(map(core_minutes, runs())) < 8
    for name in BOUNDARIES:
        assert sorted(run.seed for run in runs() if run.name == name) == [*SEEDS]


def test_bytes_a_token_by_hand():
    """Width 256, micro-batches of 4 samples of 128 tokens, ids of 2 bytes and one more of them than tokens."""
    ids = 2 * 129 / 128
    stated = {run.name: run.nbytes_per_token for run in runs()}
    assert stated["fp32"] == (1024 + ids, 1024)
    assert stated["int8 rotated"] == (260 + ids, 260)
    assert stated["int4"] == (128 + 2 * 4 + ids, 136)
    whole = (512 + 127 * 8 * 2) / 128 + 8 / 512  # the first token; eight channels of the others; positions of 8 bits
    assert stated["preset tuning"][1] == 260 * 127 / 128 + whole
    assert stated["preset tuning-thin"][1] == 136 * 127 / 128 + whole


def write_records(output, losses, initial="same"):
    """`losses`: by name and seed."""
    facts = {"seconds": 60.0, "versions": {"torch": "2"}, "parameters": 11_000_000, "tokens": 2_600_000}
    base = {"settings": settings_of(Base()), "initial_sha256": "same", "before": 5.0, "largest_channels": [2, 3, 4]}
    (output / "records").mkdir(parents=True)
    result_path(Base(), output).write_text(json.dumps({**base, **facts, "data_sha256": "books"}))
    for run in runs():
        if (loss := losses.get((run.name, run.seed), ...)) is not ...:
            kept = {"name": run.name, "seed": run.seed, "lr": run.lr, "loss": loss, "loss_whole": loss}
            kept |= {"settings": settings_of(run), "initial_sha256": initial}
            result_path(run, output).write_text(json.dumps({**kept, **facts}))


def test_the_share_of_the_gain_is_that_of_the_same_seed(tmp_path):
    losses = {(WHOLE, 0): 3.0, (WHOLE, 1): 4.0, ("int8", 0): 3.02, ("int8", 1): 4.01, ("int4", 0): None}
    write_records(tmp_path, losses)
    results = read_results(tmp_path)
    assert results.share_lost("int8") == pytest.approx([1.0, 1.0])
    rows = [line for line in page(results) if line.startswith("| int")]
    assert [row.split("|")[1].strip() for row in rows] == ["int8", "int4"]
    assert "+1.00 ± 0.00" in rows[0]
    assert rows[1].endswith("not finite |")


def test_records_of_another_base_or_other_books_are_refused(source, tmp_path, monkeypatch):
    write_records(tmp_path / "output", {(WHOLE, 0): 3.0}, initial="other")
    with pytest.raises(UserError, match="started from other weights than the base"):
        read_results(tmp_path / "output")
    with pytest.raises(UserError, match="was trained on other tokens"):
        has_base(Base(), source, tmp_path, tmp_path / "output")
    monkeypatch.setattr("benchmarks.tuning_boundaries.record.weights_sha256", lambda _folder: "same")
    with pytest.raises(UserError, match="started from another base"):
        refuse_other_bases([*runs()], tmp_path, tmp_path / "output")
    with pytest.raises(UserError, match="there are no finished runs"):
        read_results(tmp_path / "nowhere")
    with pytest.raises(UserError, match="thinpipe tokenize"):
        data_sha256(tmp_path / "nowhere")
    assert not is_done(smoke_runs()[0], tmp_path / "output"), "the same key, with other settings"
