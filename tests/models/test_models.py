"""Models: sizes, cuts, first values, and ways of running that change nothing."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from thinpipe.core.errors import UserError
from thinpipe.models import PRESETS, ExecutionConfig, GPT2Config, LlamaConfig, SubspaceConfig, build, materialise
from thinpipe.subspace import Basis, ResidualWriter, coordinates_of

LLAMA = LlamaConfig(vocab_size=96, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=80, max_seq_len=24)
GPT2 = GPT2Config(vocab_size=96, dim=32, n_layers=4, n_heads=4, max_seq_len=24)
CUT = {"boundaries": (1, 3), "subspace": SubspaceConfig(width=6)}
CONFIGS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "llama-subspace": replace(LLAMA, **CUT),
    "gpt2-subspace": replace(GPT2, **CUT),
    "llama-gaussian": replace(LLAMA, boundaries=(1, 3), subspace=SubspaceConfig(width=6, fixed="gaussian")),
}
IDS = torch.arange(2 * 24).view(2, 24) * 7 % 96


def gradients(model):
    model.zero_grad()
    logits = model(IDS, dropout_seed=5)
    F.cross_entropy(logits.float().flatten(0, 1), IDS.roll(-1, 1).flatten()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_llama_8b_has_its_published_number_of_parameters():
    model = build(PRESETS["llama-8b"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(("name", "count"), [("llama-1b", 1_235_814_400), ("gpt2", 124_439_808)])
def test_other_published_sizes(name, count):
    assert sum(parameter.numel() for parameter in build(PRESETS[name]).parameters()) == count


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_confines(name):
    config = PRESETS[name]
    cut = replace(
        config, tied=False, boundaries=(config.n_layers // 2,), subspace=SubspaceConfig(width=config.dim // 8)
    )
    model = build(cut)
    half = config.n_layers // 2
    for index, block in enumerate(model.blocks):
        widths = {module.out_features for module in block.modules() if isinstance(module, ResidualWriter)}
        assert widths == {config.dim // 8 if index < half else config.dim}


@pytest.mark.parametrize("name", CONFIGS)
def test_causal_and_finite(name):
    model = materialise(build(CONFIGS[name]), seed=1)
    changed = IDS.clone()
    changed[:, 12:] = 0
    before, after = model(IDS), model(changed)
    assert before.shape == (2, 24, 96)
    assert torch.isfinite(before).all()
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_segment_holds_the_whole_models_names_and_first_values(name):
    config = CONFIGS[name]
    whole = dict(materialise(build(config), seed=5).named_parameters())
    seen = {}
    for index in reversed(range(len(config.segments))):
        alone = build(config).segments[index]
        seen |= dict(materialise(alone, seed=5).named_parameters())
    assert seen.keys() == whole.keys()
    assert all(torch.equal(seen[name], whole[name]) for name in whole)


def test_first_values_do_not_depend_on_cuts_width_or_dtype():
    dense = dict(materialise(build(LLAMA), seed=5).named_parameters())
    cut = dict(materialise(build(CONFIGS["llama-subspace"]), seed=5, dtype=torch.bfloat16).named_parameters())
    same_shape = [name for name in dense if dense[name].shape == cut[name].shape]
    assert len(same_shape) > len(dense) / 2
    assert all(torch.equal(dense[name].bfloat16(), cut[name]) for name in same_shape)
    other = dict(materialise(build(LLAMA), seed=6).named_parameters())
    assert not torch.equal(dense["blocks.0.mlp.up_proj.weight"], other["blocks.0.mlp.up_proj.weight"])
    assert not torch.equal(dense["blocks.0.mlp.up_proj.weight"], dense["blocks.1.mlp.up_proj.weight"])


def test_first_values_have_the_stated_spread():
    model = materialise(build(PRESETS["llama-tiny"]), seed=1)
    block = model.blocks[0]
    assert block.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.03)
    assert torch.equal(block.input_layernorm.weight, torch.ones(128))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_come_in_layer_order(name):
    """Norms are summed in this order everywhere, so that any placement gives the same bits."""
    model = build(CONFIGS[name])
    layers = ["first", *(f"blocks.{index}" for index in range(4)), "last"]

    def layers_of(part):
        return list(
            dict.fromkeys(re.sub(r"^(blocks\.\d+|first|last)\..*", r"\1", n) for n, _ in part.named_parameters())
        )

    assert layers_of(model) == layers
    assert [layer for segment in model.segments for layer in layers_of(segment)] == layers


def test_a_second_segment_leaves_a_basis_that_has_moved_on():
    model = build(CONFIGS["llama-subspace"])
    materialise(model.segments[0], seed=1)
    moved = Basis(Basis.random(32, 6, seed=99).matrix_DK, version=3)
    model.space.basis = moved
    materialise(model.segments[1], seed=1)
    assert (model.space.basis.hash, model.space.version) == (moved.hash, 3)


def test_materialising_keeps_marks_and_ties():
    confined = materialise(build(CONFIGS["gpt2-subspace"]), seed=1)
    names = {name for name, parameter in confined.named_parameters() if coordinates_of(parameter)}
    blocks = {
        f"blocks.{i}.{part}.c_proj.{kind}" for i in range(3) for part in ("attn", "mlp") for kind in ("weight", "bias")
    }
    assert names == blocks | {"first.wte.weight", "first.wpe.weight"}
    tied = materialise(build(replace(GPT2, tied=True)), seed=1)
    assert tied.last.lm_head.weight is tied.first.wte.weight
    assert "last.lm_head.weight" not in dict(tied.named_parameters())


def test_basis_and_tables_keep_their_precision_in_a_bf16_model():
    model = materialise(build(CONFIGS["llama-subspace"]), seed=1, dtype=torch.bfloat16)
    assert model.space.basis_DK.dtype == torch.float32
    assert model.space.basis.hash == materialise(build(CONFIGS["llama-subspace"]), seed=2).space.basis.hash
    assert model(IDS).dtype == torch.bfloat16


@pytest.mark.parametrize("checkpointing", ["block", "segment"])
@pytest.mark.parametrize("name", CONFIGS)
def test_activation_checkpointing_is_bitwise_the_same(name, checkpointing):
    model = materialise(build(CONFIGS[name]), seed=1)
    plain = gradients(model)
    model.set_execution(ExecutionConfig(checkpoint_activations=checkpointing))
    again = gradients(model)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize(("checkpointing", "calls"), [("block", 4), ("segment", 3)])
def test_activation_checkpointing_shows_torch_a_tensor(monkeypatch, checkpointing, calls):
    """Without one torch would not restore the autocast of the device when a block is computed again."""
    seen = []

    def spy(function, *arguments, **options):
        assert options == {"use_reentrant": False, "preserve_rng_state": False}
        seen.append(any(isinstance(argument, torch.Tensor) for argument in arguments))
        return function(*arguments)

    monkeypatch.setattr("thinpipe.models.model.checkpoint", spy)
    model = materialise(build(CONFIGS["gpt2-subspace"]), seed=1)
    model.set_execution(ExecutionConfig(checkpoint_activations=checkpointing))
    model(IDS)
    assert seen == [True] * calls


def test_activation_checkpointing_keeps_fewer_tensors():
    kept = {}
    for mode in ("none", "block", "segment"):
        model = materialise(build(CONFIGS["llama-subspace"]), seed=1)
        model.set_execution(ExecutionConfig(checkpoint_activations=mode))
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.nbytes) or x, lambda x: x):
            model.segments[0](IDS)
        kept[mode] = sum(saved)
    assert kept["block"] < kept["none"] / 3
    assert kept["segment"] == IDS.nbytes < kept["block"]


@pytest.mark.parametrize("checkpointing", ["block", "segment"])
def test_the_basis_tracker_sees_a_recomputed_gradient_once(checkpointing):
    model, seen = materialise(build(CONFIGS["llama-subspace"]), seed=1), []
    model.segments[-1].on_gradient = seen.append
    for mode in ("none", checkpointing):
        model.set_execution(ExecutionConfig(checkpoint_activations=mode))
        model(IDS).square().mean().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


@pytest.mark.parametrize("name", ["llama", "llama-subspace", "gpt2-subspace"])
def test_bf16_autocast_is_close_and_state_keeps_its_dtype(name):
    model = materialise(build(CONFIGS[name]), seed=1)
    exact = model(IDS)
    model.set_execution(ExecutionConfig(), autocast_bf16=True)
    torch.testing.assert_close(model(IDS).float(), exact, rtol=0.05, atol=0.02)
    if len(model.segments) > 1:
        assert model.segments[0](IDS).dtype == torch.float32


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # the compiler warns about its own insides
@pytest.mark.parametrize("config", [CONFIGS["llama-subspace"], replace(GPT2, dropout=0.1)], ids=["llama", "dropout"])
def test_compiled_blocks_agree(config):
    """And each is one graph, unless dropout is on."""
    from torch._dynamo.utils import counters

    model = materialise(build(config), seed=1)
    plain = gradients(model)
    model.set_execution(ExecutionConfig(compile=True))
    counters.clear()
    compiled = gradients(model)
    assert bool(counters["graph_break"]) == (config.spec.dropout(config) > 0)
    for name in plain:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundaries": (0, 2)}, "rise strictly"),
        ({"boundaries": (3, 2)}, "rise strictly"),
        ({"boundaries": (4,)}, "rise strictly"),
        ({"n_heads": 5}, "multiple of n_heads"),
        ({"n_kv_heads": 3}, "multiple of n_kv_heads"),
        ({"n_heads": 32, "n_kv_heads": 32}, "even head width"),
        ({"tied": True, "boundaries": (2,)}, "tied model cannot be cut"),
        ({"tied": True, "subspace": SubspaceConfig(width=4, free_last=False)}, "cannot be tied"),
        ({"subspace": SubspaceConfig(width=4)}, "free_last = false"),
        ({"subspace": SubspaceConfig(width=33, free_last=False)}, "between 1 and dim"),
    ],
)
def test_impossible_models_are_refused_with_a_way_out(change, message):
    with pytest.raises(UserError, match=message):
        replace(LLAMA, **change)


def test_a_later_segment_needs_a_state():
    model = materialise(build(CONFIGS["llama-subspace"]), seed=1)
    with pytest.raises(ValueError, match="only the first segment"):
        model.segments[1](IDS)
