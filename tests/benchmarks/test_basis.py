"""How a basis moves, in words and numbers, and a short training that is followed."""

import json
import math

import pytest
import torch

from benchmarks.basis import Energy, Options, follow
from benchmarks.basis_figure import draw
from benchmarks.basis_movement import distances, movement, read_changes, spectrum, summary, table
from benchmarks.basis_report import write_report
from thinpipe.subspace import Basis
from thinpipe.subspace.basis import orthonormalise
from thinpipe.training.trainer import Trainer

DIM, WIDTH, UPDATES = 40, 3, 60
RANDOM = math.sqrt(1 - WIDTH / DIM)


def turned(angle):
    """The first axes, all turned by an angle towards axes of their own."""
    eye = torch.eye(DIM, dtype=torch.float64)
    return Basis(math.cos(angle) * eye[:, :WIDTH] + math.sin(angle) * eye[:, WIDTH : 2 * WIDTH])


def random_walk(size):
    generator = torch.Generator().manual_seed(1)
    matrix = torch.eye(DIM, dtype=torch.float64)[:, :WIDTH]
    for _ in range(UPDATES + 1):
        matrix = orthonormalise(matrix + size * torch.randn(DIM, WIDTH, generator=generator, dtype=torch.float64))
        yield Basis(matrix)


@pytest.mark.parametrize(
    ("bases", "word", "power"),
    [
        ([turned(0.01 * step) for step in range(UPDATES + 1)], "moves on", 1.0),
        ([turned(0.3 * (step % 2)) for step in range(UPDATES + 1)], "overshoots", None),
        ([turned(0.3 * math.sin(math.pi * step / 5)) for step in range(UPDATES + 1)], "turns back", None),
        ([turned(1 / (step + 1)) for step in range(UPDATES + 1)], "settles", None),
        ([turned(0.004 * step) for step in range(UPDATES + 1)], "moves on", 1.0),
        ([turned(0.01 * math.sin(2 * step)) for step in range(UPDATES + 1)], "settles", None),
        (list(random_walk(0.01)), "wanders", 0.5),
        (list(random_walk(1.0)), "forgets", 0.0),
    ],
    ids=["straight", "to and fro", "swinging", "converging", "slow but steady", "trembling", "random walk", "far"],
)
def test_a_word_for_how_it_moves(bases, word, power):
    changes = [distances(bases[: last + 1]) for last in range(1, len(bases))]
    found, growth = movement(changes, RANDOM)
    assert found == word
    if power is not None:
        assert growth == pytest.approx(power, abs=0.05)


def test_distances_are_sines_of_the_angles():
    found = distances([turned(0.0), turned(0.2), turned(0.5)])
    assert found["to_first"] == pytest.approx(math.sin(0.5))
    assert found["apart"] == pytest.approx({"1": math.sin(0.3), "2": math.sin(0.5)})
    assert found["angles"] == pytest.approx([0.3] * WIDTH)


def test_spectrum_tells_a_stretched_basis():
    assert spectrum(turned(0.7))["gram_error"] < 1e-15
    stretched = Basis(turned(0.7).matrix_DK * torch.tensor([1.0, 1.1, 1.0]))
    assert spectrum(stretched)["eigenvalues_minus_1"] == pytest.approx([0.0, 0.0, 0.21])


def test_best_energy_is_that_of_the_leading_directions():
    energy = Energy(4)
    energy.observe(torch.diag(torch.tensor([1.0, 3.0, 2.0, 0.0]))[None])
    assert energy.best(2) == pytest.approx((9 + 4) / 14)
    assert not energy.s_DD.any()


def test_a_training_is_followed(tokens, tmp_path):
    options = Options(
        data=tokens, output=tmp_path / "basis", dim=32, width=4, updates=6, interval=4, batch_size=4, seq_len=16
    )
    changes = list(follow(options, 1.0))
    assert [change["step"] for change in changes] == [4, 8, 12, 16, 20, 24]
    assert [change["version"] for change in changes] == [1, 2, 3, 4, 5, 6]
    for change in changes:
        assert 0 < change["captured_energy"] <= change["best_energy"] <= 1
        assert change["gram_error"] < 1e-6
        assert 0 < change["apart"]["1"] < 1
        assert max(change["angles"]) == pytest.approx(change["largest_angle"])
    assert changes[-1]["captured_energy"] > changes[0]["captured_energy"], "U moves to where the gradients are"
    found = summary(changes, RANDOM)
    draw({"step size 1": changes}, RANDOM, options.output.with_suffix(".png"))
    assert len(list(table({"step size 1": found}))) == 3
    assert json.loads(json.dumps(changes)) == changes
    kept = {
        "options": {"dim": 32, "width": 4},
        "versions": {"torch": "2"},
        "summaries": {"step size 1": found},
        "changes": {"step size 1": changes},
    }
    page = write_report(json.loads(json.dumps(kept)), options.output)
    assert page == options.output.with_suffix(".md").read_text()
    assert "| step size 1 | 6 |" in page


def test_finished_runs_are_read_from_their_folder_or_their_record(run_config, tmp_path):
    Trainer(run_config).train()
    changes = read_changes(run_config.job.dump_folder)
    assert [change["step"] for change in changes] == [5, 10]
    (tmp_path / "record.json").write_text(json.dumps({"basis_changes": changes}))
    assert read_changes(tmp_path / "record.json") == changes
    found = summary(changes, None)
    costs = [change["loss_after"] - change["loss_before"] for change in changes]
    assert found["loss_added_by_a_change"] == pytest.approx(sum(costs) / 2)
    assert found["kept_of_all"] == pytest.approx(changes[0]["kept_norm"] * changes[1]["kept_norm"])
    draw({"run": changes}, None, tmp_path / "run.png")
    with pytest.raises(ValueError, match="zip"):  # more lines than colours: none is left out silently
        draw({str(number): changes for number in range(7)}, None, tmp_path / "many.png")
