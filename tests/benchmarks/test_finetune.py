"""The fine-tuning study: its data, its bytes, its verdicts, and what "compression off" means."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.convergence.execute import result_path, settings_of
from benchmarks.finetune import __main__ as command
from benchmarks.finetune.books import cut_books, split_documents
from benchmarks.finetune.figure import draw
from benchmarks.finetune.record import has_pretrained, loss_whole, record, record_pretraining
from benchmarks.finetune.results import Losses, Results, results_of
from benchmarks.finetune.runs import LR, METHODS, PRETRAINED, RESTED_ON, RUNS, SEEDS, Finetuning, Pretraining
from benchmarks.finetune.stamp import claim_folders, stamp_of
from benchmarks.lossy_claims import decide
from tests.train.test_trainer import events
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import Validated
from thinpipe.data import ShardWriter, Tokenizer, Tokens, Windows
from thinpipe.training.trainer import Trainer

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "finetune"


@pytest.fixture
def source(tmp_path):
    """Three books of the words "one", "two", ... as `thinpipe tokenize` leaves them."""
    words = ["one two three four five six seven eight nine ten " * 80] * 3
    tokenizer = Tokenizer.train(words, vocab_size=257)
    tokenizer.save(tmp_path / "source" / "tokenizer")
    with ShardWriter(tmp_path / "source" / "validation", tokenizer.vocabulary, source="words") as writer:
        for number, ids in enumerate(tokenizer.encode_batch(words)):
            writer.add(np.roll(ids, number), text_nbytes=len(words[0]))
        writer.finish()
    return tmp_path / "source"


def test_books_are_cut_into_whole_samples_that_do_not_meet(source, tmp_path):
    cut_books(source, tmp_path / "books", books=2, seq_len=32, samples=40, validation_samples=10)
    train, validation = (Tokens(tmp_path / "books" / side) for side in ("train", "validation"))
    assert (len(Windows(train, 32)), len(Windows(validation, 32))) == (40, 10)
    books = split_documents(Tokens(source / "validation"))[:2]
    for book, first, second in zip(books, split_documents(train), split_documents(validation), strict=True):
        assert book[: len(first) + len(second)].tolist() == [*first.tolist(), *second.tolist()]
    assert train.manifest.text_nbytes == len(train) - 2  # every token but the closing ones is a byte here


def test_books_that_are_too_short_are_refused(source, tmp_path):
    with pytest.raises(UserError, match=r"these have 3,920, 3,920: "):
        cut_books(source, tmp_path / "books", books=2, seq_len=32, samples=400, validation_samples=10)


def test_settings_of_every_run_survive_the_file_they_are_given_in(tmp_path):
    for run in RUNS:
        config = run.config(tmp_path, tmp_path / run.key)
        (tmp_path / "run.toml").write_text(dump_toml(config))
        assert load_toml(tmp_path / "run.toml", RunConfig) == config
    assert {run.name for run in RUNS if run.seed == SEEDS[-1]} == set(RESTED_ON)
    assert {run.name for run in RUNS if run.seed == SEEDS[0]} == {*METHODS, "learning rate"}


def test_bytes_a_token():
    """Width 128, 128 tokens a sample, 2 bytes an id and one id more than tokens."""
    ids, whole = 2 * 129 / 128, 2 * 128

    def sizes(name):
        run = Finetuning(name=name, boundary=METHODS[name])
        return run.forward_nbytes - ids, run.backward_nbytes, run.paper_forward_nbytes - ids

    assert sizes("uncompressed") == (whole, whole, whole)
    kept = round(0.1 * 128 * 128) * 2 / 128
    bitmap = 128 / 8
    assert sizes("topk 10% states") == (kept + bitmap, whole, kept + bitmap)
    assert sizes("topk 10% gradients") == (whole, kept + bitmap, whole)
    assert sizes("topk 10% both, mask reused") == (kept + bitmap, kept, kept + bitmap)
    assert sizes("topk 10% AQ-SGD, mask reused") == pytest.approx(
        (kept + bitmap, kept, (whole + 3 * (kept + bitmap)) / 4), rel=1e-12
    )


def made_up(seeds=SEEDS):
    """Every run loses a tenth of a gain of 1 when it is on and three tenths when it is off."""
    return Results({name: {seed: Losses(4.1, 4.3) for seed in seeds} for name in METHODS}, 5.0)


def test_a_diverged_run_is_worse_than_any_other_and_has_no_difference():
    kept = [
        {"name": "uncompressed", "seed": 0, "lr": LR, "on": 4.0, "off": 4.0},
        {"name": "topk 5% states", "seed": 0, "lr": LR, "on": None, "off": None},
        {"name": "learning rate", "seed": 0, "lr": 3 * LR, "on": 3.0, "off": 3.0},
    ]
    results = results_of(kept, before=5.0)
    assert results.cost("topk 5% states") == [math.inf]
    assert math.isnan(*results.off_minus_on("topk 5% states"))
    assert results.measured("learning rate").on == ()


def test_every_claim_has_its_runs_with_all_seeds_or_decides_nothing():
    words = [str(claim.verdict) for claim in decide(made_up().evidence, made_up().judge)]
    assert not any("seeds" in word for word in words)
    assert any(word == "reproduced" for word in words)
    few = made_up(SEEDS[:2])
    assert {str(claim.verdict) for claim in decide(few.evidence, few.judge)} == {"not decided: 2 of 3 seeds"}


def test_the_figure_is_drawn_from_whatever_is_there(tmp_path):
    results = made_up()
    few = {name: results.losses[name] for name in ("uncompressed", "topk 10% states")}
    draw(Results(few, results.before), tmp_path / "few.png")
    assert (tmp_path / "few.png").stat().st_size > 10_000


def test_off_is_the_loss_that_validation_with_whole_states_would_have_found(run_config):
    """The same weights: at_inference changes validation alone."""
    dense = replace(run_config.model, subspace=type(run_config.model.subspace)())
    boundary = BoundaryConfig(
        states=CompressionConfig(kind="topk", keep=0.1, feedback="ef21"),
        gradients=CompressionConfig(kind="topk", keep=0.2),
    )
    losses, found = {}, {}
    for at_inference in (True, False):
        folder = run_config.job.dump_folder / str(at_inference)
        config = replace(
            run_config,
            job=replace(run_config.job, dump_folder=folder),
            model=dense,
            boundary=replace(boundary, at_inference=at_inference),
        )
        Trainer(config).train()
        losses[at_inference] = events(config, Validated)[-1].loss
        found[at_inference] = loss_whole(config, folder)
    assert losses[True] != losses[False] == found[True] == found[False]


def test_a_last_validation_that_was_not_finite_is_not_replaced_by_an_earlier_one(run_config, monkeypatch):
    folder, steps = run_config.job.dump_folder, run_config.training.steps
    Trainer(run_config).train()
    monkeypatch.setattr("benchmarks.finetune.record.weights_sha256", lambda _folder: "")
    monkeypatch.setattr("benchmarks.finetune.record.loss_whole", lambda *_: math.nan)
    monkeypatch.setattr(Finetuning, "steps", steps)
    run = Finetuning(name="uncompressed", boundary=METHODS["uncompressed"])
    last = events(run_config, Validated)[-1]
    assert last.step == steps
    kept = record(run, folder)
    assert (kept["on"], kept["off"], kept["ended"], kept["settings"]) == (last.loss, None, "finished", settings_of(run))
    log = folder / "events.jsonl"
    log.write_text(log.read_text().replace(f'"loss":{last.loss!r},"bits', '"loss":null,"bits'))
    kept = record(run, folder)
    assert kept["on"] is None
    assert kept["validations"], "there were earlier ones"


def test_weights_without_a_record_are_made_again(run_config, tmp_path, monkeypatch):
    """As after a crash at any moment between the two."""
    work, output, run = tmp_path / "work", tmp_path / "output", Pretraining()
    folder = work / run.key
    Trainer(replace(run_config, job=replace(run_config.job, dump_folder=folder))).train()

    def loss_of(config, weights):
        assert config.model.initial == weights
        assert (weights / "checkpoints").is_dir()
        return 5.0

    monkeypatch.setattr("benchmarks.finetune.record.loss_whole", loss_of)
    for _ in range(2):
        kept = record_pretraining(run, folder)
        assert not has_pretrained(work, output), "there is no record yet"
    path = result_path(run, output)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(kept))
    assert has_pretrained(work, output)
    path.write_text(json.dumps({**kept, "initial_sha256": "of others"}))
    assert not has_pretrained(work, output)

    def fails(*_):
        raise KeyboardInterrupt

    shutil.rmtree(work / PRETRAINED)
    monkeypatch.setattr("benchmarks.finetune.record.loss_whole", fails)
    with pytest.raises(KeyboardInterrupt):
        record_pretraining(run, folder)
    assert not (work / PRETRAINED).exists(), "weights are put in place last"
    monkeypatch.setattr("benchmarks.finetune.record.ended", lambda _folder: "not_finite")
    with pytest.raises(UserError, match="the pretraining ended with not_finite"):
        record_pretraining(run, folder)


def test_folders_of_other_data_or_other_constants_are_refused(source, tmp_path, monkeypatch):
    shutil.copytree(source / "validation", source / "train")
    work, output = tmp_path / "work", tmp_path / "output"
    for _ in range(2):
        claim_folders(work, output, stamp_of(source))
    path = result_path(Pretraining(), output)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"stamp": stamp_of(source), "settings": settings_of(Pretraining())}))
    manifest = source / "train" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("words", "others"))
    for folder in (work, tmp_path / "new"):  # the records alone are enough to refuse
        with pytest.raises(UserError, match=r"made with other inputs \(train of --data\): "):
            claim_folders(folder, output, stamp_of(source))
    monkeypatch.setattr("benchmarks.finetune.stamp.SAMPLES", 12)
    with pytest.raises(UserError, match=r"\(train of --data, size of the books\): "):
        claim_folders(work, output, stamp_of(source))
    (tmp_path / "old" / "books").mkdir(parents=True)
    with pytest.raises(UserError, match="old was made with other inputs"):
        claim_folders(tmp_path / "old", tmp_path / "none", stamp_of(source))


def test_a_committed_record_is_of_the_study_of_today(tmp_path):
    """Its settings have old names, and lack those that are newer: the values count."""
    committed = json.loads(result_path(Pretraining(), RECORDS).read_text())
    hashes = {name: committed["stamp"][name] for name in ("train of --data", "validation of --data")}
    constants = {"size of the books": committed["stamp"]["size of the books"]}
    claim_folders(tmp_path / "work", RECORDS, {**hashes, **constants})
    path = result_path(Pretraining(), tmp_path / "output")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(committed | {"settings": committed["settings"].replace("lr = 0.003", "lr = 0.004")}))
    with pytest.raises(UserError, match=r"\(settings of the pretraining\): "):
        claim_folders(tmp_path / "other", tmp_path / "output", {**hashes, **constants})


@pytest.mark.parametrize("whole", [True, False])
def test_the_exit_code_is_no_count(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "execute", lambda *_, **__: 0 if whole else 256)
    for name in ("claim_folders", "stamp_of", "cut_books", "has_pretrained"):
        monkeypatch.setattr(command, name, lambda *_, **__: True)
    monkeypatch.setattr("sys.argv", ["finetune", "run", "--data", str(tmp_path), "--output", str(tmp_path)])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert command.main() == (0 if whole else 1)
