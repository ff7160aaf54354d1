"""The fine-tuning study: its data, its bytes, its verdicts, and what "compression off" means."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.finetune.books import cut_books, split_documents
from benchmarks.finetune.claims import claims, decided, spread
from benchmarks.finetune.figure import draw
from benchmarks.finetune.record import loss_whole
from benchmarks.finetune.results import Losses, Results, results_of
from benchmarks.finetune.runs import LR, METHODS, RESTED_ON, RUNS, SEEDS, Finetuning
from tests.train.conftest import run_config, tokens  # noqa: F401  fixtures
from tests.train.test_loop import events
from thinpipe.boundary.settings import BoundarySection, Compression
from thinpipe.core.config import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import Validated
from thinpipe.data import ShardWriter, Tokenizer, Tokens, Windows
from thinpipe.train.config import RunConfig
from thinpipe.train.loop import Trainer


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
    assert sizes("topk 10% AQ-SGD") == pytest.approx(
        (kept + bitmap, kept, (whole + 3 * (kept + bitmap)) / 4), rel=1e-12
    )


def made_up(costs, seeds=SEEDS):
    """Results by (on, off) above an uncompressed loss of 4, after a gain of 1; what is not named costs nothing."""
    above = {name: costs.get(name, (0.0, 0.0)) for name in METHODS}
    return Results({name: {seed: Losses(4 + on, 4 + off) for seed in seeds} for name, (on, off) in above.items()}, 5.0)


def verdicts(results):
    return {claim.text: claim.verdict for claim in claims(results)}


GRADIENTS = "Gradients need milder compression than activations: "
LOWEST = "K = 10 % is the lowest TopK that does not hurt badly"
AQSGD = "TopK with AQ-SGD hurts badly below 30 %"
NEEDED = "A model trained with TopK works well only if compression stays on at inference"
FREED = "With error feedback, inference without compression costs almost nothing: EF"
HELPS = "Error feedback does not help training: EF"
REUSED = "The backward pass should reuse the forward mask (and sends no positions)"

AS_IN_THE_PAPER = {
    "topk 10% gradients": (0.4, 0.4),
    "topk 10% states": (0.1, 0.3),
    "quantise 2 bit gradients": (0.5, 0.5),
    "quantise 2 bit states": (0.2, 0.2),
    "topk 10% both, mask reused": (0.3, 0.8),
    "topk 5% both, mask reused": (0.7, 0.9),
    "topk 10% both, own masks": (0.4, 0.8),
    "topk 10% EF": (0.4, 0.45),
    "topk 10% EF21": (0.4, 0.45),
    "topk 30% AQ-SGD": (0.1, 0.1),
    "topk 20% AQ-SGD": (0.6, 0.6),
}


def test_the_papers_figures_would_reproduce_every_claim():
    assert set(verdicts(made_up(AS_IN_THE_PAPER)).values()) == {"reproduced"}


@pytest.mark.parametrize(
    ("changes", "text", "verdict"),
    [
        ({"topk 10% states": (0.6, 0.6)}, GRADIENTS + "TopK", "refuted"),
        ({"topk 10% states": (0.395, 0.6)}, GRADIENTS + "TopK", "not decided"),
        ({"quantise 4 bit states": (0.3, 0.3)}, GRADIENTS + "quantisation", "not decided"),
        ({"topk 5% both, mask reused": (0.4, 0.4)}, LOWEST, "refuted"),
        ({"topk 10% both, mask reused": (0.6, 0.6)}, LOWEST, "refuted"),
        ({"topk 20% AQ-SGD": (0.2, 0.2)}, AQSGD, "refuted"),
        ({"topk 10% both, mask reused": (0.3, 0.2)}, NEEDED, "refuted"),
        ({"topk 10% EF": (0.4, 0.6)}, FREED, "refuted"),
        ({"topk 10% EF": (0.2, 0.2)}, HELPS, "refuted"),
        ({"topk 10% EF": (0.305, 0.305)}, HELPS, "reproduced"),
        ({"topk 10% both, own masks": (0.2, 0.8)}, REUSED, "refuted"),
    ],
)
def test_other_figures_give_other_verdicts(changes, text, verdict):
    assert verdicts(made_up({**AS_IN_THE_PAPER, **changes}))[text] == verdict


def test_nothing_is_decided_by_one_seed_or_by_seeds_that_disagree():
    assert set(verdicts(made_up(AS_IN_THE_PAPER, seeds=SEEDS[:1])).values()) == {"not decided"}
    assert [decided(values) for values in ([0.1, 0.2, 0.3], [0.1, 0.2, -0.01], [-0.1, -0.1, -0.2])] == [1, 0, -1]


def test_a_diverged_run_is_worse_than_any_other():
    kept = [
        {"name": "uncompressed", "seed": 0, "lr": LR, "on": 4.0, "off": 4.0},
        {"name": "topk 5% states", "seed": 0, "lr": LR, "on": None, "off": None},
        {"name": "learning rate", "seed": 0, "lr": 3 * LR, "on": 3.0, "off": 3.0},
    ]
    results = results_of(kept, before=5.0)
    assert results.cost("topk 5% states") == [float("inf")]
    assert results.off_minus_on("topk 5% states") == [0.0]
    assert results.on("learning rate") == []


def test_spread_is_half_the_range():
    assert spread([1.0, 2.0, 1.5]) == "+1.500 ± 0.500"
    assert spread([0.25], ".0%") == "+25%"
    assert spread([]) == "missing"


def test_the_figure_is_drawn_from_whatever_is_there(tmp_path):
    results = made_up(AS_IN_THE_PAPER)
    few = {name: results.losses[name] for name in ("uncompressed", "topk 10% states")}
    draw(Results(few, results.before), tmp_path / "few.png")
    assert (tmp_path / "few.png").stat().st_size > 10_000


def test_off_is_the_loss_that_validation_with_whole_states_would_have_found(run_config):  # noqa: F811
    """The same weights: at_inference changes validation alone."""
    dense = replace(run_config.model, subspace=type(run_config.model.subspace)())
    boundary = BoundarySection(
        states=Compression(kind="topk", keep=0.1, memory="ef21"), gradients=Compression(kind="topk", keep=0.2)
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
