"""Casting keeps embeddings and readers, confines writers as well as any basis can, and says what was lost."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from thinpipe.core.errors import UserError
from thinpipe.models import GPT2Config, LlamaConfig, Model, ModelConfig, SubspaceConfig, build, materialise
from thinpipe.models.to_dense import to_dense
from thinpipe.models.to_subspace import ToSubspaceReport, to_subspace
from thinpipe.subspace import ResidualWriter, Subspace

LLAMA = LlamaConfig(
    vocab_size=96, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=80, max_seq_len=24, init_std=0.2
)
GPT2 = GPT2Config(vocab_size=96, dim=32, n_layers=4, n_heads=4, max_seq_len=24, init_std=0.2)
CONFIGS: dict[str, ModelConfig] = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied=True),
    "gpt2": replace(GPT2, boundaries=(2,)),
    "gpt2-tied": replace(GPT2, tied=True),
}
PLACES = {"free": ((1, 3), True), "confined": ((2,), False), "uncut": ((), False)}
IDS = torch.arange(2 * 24).view(2, 24) * 7 % 96


@torch.no_grad()
def model_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Model:
    """No zero bias and no unit norm left: every tensor shows in the logits."""
    model = materialise(build(config), seed=1, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.1)
    return model


def given(width: int | None, free_last: bool = False, **changes: Any) -> SubspaceConfig:
    return SubspaceConfig(**{"width": width, "free_last": free_last, "fixed": "given", **changes})


def worst(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((actual - expected).abs().max() / expected.abs().max())


def space_of(model: Model) -> Subspace:
    assert isinstance(model.space, Subspace)
    return model.space


def everything_written(model: Model) -> Tensor:
    """The weights and biases of all writers of a dense model, side by side."""
    writers = [module for module in model.modules() if isinstance(module, ResidualWriter)]
    return torch.cat([part.view(32, -1) for writer in writers for part in writer.parameters()], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CONFIGS)
def test_full_width_is_exact(name: str, place: str) -> None:
    dense, (boundaries, free_last) = model_of(CONFIGS[name]), PLACES[place]
    model, report = to_subspace(dense, given(32, free_last), boundaries)
    assert (model.config.boundaries, model.config.tied, model.training) == (boundaries, False, False)
    assert worst(model(IDS), dense(IDS)) <= 1e-10
    assert report.retained == pytest.approx(1.0, abs=1e-12)
    assert report.width == 32


@torch.no_grad()
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_to_subspace_finds_the_subspace_of_a_dense_export(config: ModelConfig, place: str) -> None:
    boundaries, free_last = PLACES[place]
    subspace = SubspaceConfig(width=6, free_last=free_last)
    confined = model_of(replace(config, boundaries=boundaries, subspace=subspace))
    model, report = to_subspace(to_dense(confined), given(6, free_last), boundaries)
    assert worst(model(IDS), confined(IDS)) <= 1e-10
    assert report.retained == pytest.approx(1.0, abs=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_to_subspace_changes_only_what_writers_write_outside_the_subspace(name: str) -> None:
    dense = model_of(CONFIGS[name])
    model, report = to_subspace(dense, given(5, free_last=True), (1, 3))
    back = dict(to_dense(model).named_parameters())
    basis_DK = space_of(model).basis_DK
    for parameter_name, parameter in dense.named_parameters(remove_duplicate=False):
        writer = parameter_name.rpartition(".")[0]
        expected = basis_DK @ (basis_DK.T @ parameter) if writer in report.retained_by_writer else parameter
        assert worst(back[parameter_name], expected) <= 1e-14, parameter_name
    assert len(report.retained_by_writer) == 6  # two in each of the three blocks before the last boundary


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("free_last", [True, False])
def test_the_path_from_the_embedding_to_the_logits_is_kept_at_any_width(name: str, free_last: bool) -> None:
    dense = model_of(CONFIGS[name])
    silent = model_of(CONFIGS[name])
    for module in silent.modules():
        if isinstance(module, ResidualWriter):
            for parameter in module.parameters():
                parameter.zero_()
    model, report = to_subspace(silent, given(1, free_last), (2,))
    assert worst(model(IDS), silent(IDS)) <= 1e-12
    assert (report.retained, set(report.retained_by_writer.values())) == (1.0, {1.0})
    assert worst(model(IDS), dense(IDS)) > 0.1  # the writers do matter
    model, _ = to_subspace(dense, given(1, free_last), (2,))
    opened = space_of(model).open(IDS, model.first(IDS))
    assert worst(opened.dense(), dense.first(IDS)) <= 1e-14
    # The frozen table has nothing of the subspace in it: all that could be trained is.
    assert float((space_of(model).tokens.content() @ space_of(model).basis_DK).abs().max()) <= 1e-14


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_frozen_table_makes_good_the_rounding_of_coordinates_and_basis(dtype: torch.dtype) -> None:
    dense = model_of(GPT2, dtype)
    model, _ = to_subspace(dense, given(6), (2,))
    space, weights = space_of(model), dict(model.named_parameters())
    assert space.positions is not None
    for name, frozen in (("first.wte.weight", space.tokens), ("first.wpe.weight", space.positions)):
        table = frozen.content().double() + weights[name].double() @ space.basis_DK.double().T
        assert worst(table, dict(dense.named_parameters())[name].double()) <= 1e-7


@torch.no_grad()
def test_the_report_of_a_known_model() -> None:
    """Writers along known directions: 9 along a; 4 along b and 1 along c; nothing; 0.25 along c."""
    config = replace(LLAMA, n_layers=2)
    model = model_of(config)
    a, b, c = torch.linalg.qr(torch.randn(32, 3, dtype=torch.float64)).Q.T
    inputs = torch.linalg.qr(torch.randn(80, 2, dtype=torch.float64)).Q.T
    weights = dict(model.named_parameters())
    weights["blocks.0.self_attn.o_proj.weight"].copy_(3 * torch.outer(a, inputs[0, :32] / inputs[0, :32].norm()))
    weights["blocks.0.mlp.down_proj.weight"].copy_(2 * torch.outer(b, inputs[0]) + torch.outer(c, inputs[1]))
    weights["blocks.1.self_attn.o_proj.weight"].zero_()
    weights["blocks.1.mlp.down_proj.weight"].copy_(torch.outer(c, inputs[0]) / 2)
    cut, report = to_subspace(model, given(2), ())
    assert report.width == 2
    assert report.retained_by_writer == pytest.approx(
        {
            "blocks.0.self_attn.o_proj": 1.0,
            "blocks.0.mlp.down_proj": 4 / 5,
            "blocks.1.self_attn.o_proj": 1.0,
            "blocks.1.mlp.down_proj": 0.0,
        },
        abs=1e-12,
    )
    assert report.retained == pytest.approx(13 / 14.25, abs=1e-12)
    expected = torch.stack((a, b), dim=1)
    assert worst((expected.T @ space_of(cut).basis_DK).abs(), torch.eye(2, dtype=torch.float64)) <= 1e-12


@torch.no_grad()
def test_a_bias_counts_as_one_more_column() -> None:
    model = model_of(replace(GPT2, n_layers=1))
    direction = torch.nn.functional.normalize(torch.randn(32, dtype=torch.float64), dim=0)
    weights = dict(model.named_parameters())
    weights["blocks.0.attn.c_proj.weight"].zero_()
    weights["blocks.0.mlp.c_proj.weight"].zero_()
    weights["blocks.0.attn.c_proj.bias"].copy_(2 * direction)
    weights["blocks.0.mlp.c_proj.bias"].zero_()
    _, report = to_subspace(model, given(1), ())
    assert report == ToSubspaceReport(
        width=1,
        retained=pytest.approx(1.0),
        retained_by_writer={"blocks.0.attn.c_proj": pytest.approx(1.0), "blocks.0.mlp.c_proj": 1.0},
    )


@torch.no_grad()
@pytest.mark.parametrize("config", [LLAMA, GPT2])
@pytest.mark.parametrize("width", [1, 7, 31])
def test_no_basis_keeps_more(config: ModelConfig, width: int) -> None:
    """Eckart and Young: the squared singular values of all that is written, largest first."""
    dense = model_of(config)
    squares = torch.linalg.svdvals(everything_written(dense)).square()
    model, report = to_subspace(dense, given(width), ())
    assert report.retained == pytest.approx(float(squares[:width].sum() / squares.sum()), abs=1e-12)
    assert space_of(model).basis.orthonormality_error <= 1e-13


def test_a_converted_model_shares_nothing_and_reloads_from_its_weights() -> None:
    dense = model_of(CONFIGS["gpt2-tied"], torch.float32)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    model, _ = to_subspace(dense, given(6, free_last=True), (1, 3))
    again = materialise(build(model.config), seed=9, draw=False).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(IDS), model(IDS))
        for parameter in model.parameters():
            parameter.fill_(9.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


def test_what_to_subspace_refuses() -> None:
    dense = model_of(LLAMA)
    for subspace in (given(None), given(4, fixed="signs")):
        with pytest.raises(UserError, match=r'set subspace.fixed = "given", and subspace.width'):
            to_subspace(dense, subspace, ())
    with pytest.raises(UserError, match="between 1 and dim 32"):
        to_subspace(dense, given(33), ())
    model, _ = to_subspace(dense, given(4), (2,))
    with pytest.raises(TypeError, match="convert it with to_dense first"):
        to_subspace(model, given(4), ())
