"""A model family is one file and one line: a family that only this module knows is built, planned, imported, trained
and exported."""

from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import ClassVar

import msgspec
import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.plan.fake_tensor_oracle import check_costs
from thinpipe.api import report
from thinpipe.checkpoint import CheckpointFolder
from thinpipe.checkpoint.load import find_checkpoint, load_model
from thinpipe.cli import import_model
from thinpipe.config.commands import ImportConfig
from thinpipe.config.families import FAMILIES, read_model
from thinpipe.config.families.llama import LLAMA, LlamaConfig
from thinpipe.config.huggingface_format import ConfigKey, HuggingFaceFormat
from thinpipe.config.model import ModelConfig, ProjectionConfig, SubspaceConfig
from thinpipe.config.model_family import MLP, Attention, FamilySpec, Rotary
from thinpipe.config.parameter_shapes import named_parameters
from thinpipe.config.run import LRSchedulerConfig, ModelSettings, ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.core.errors import UserError
from thinpipe.core.events import Step, read_events
from thinpipe.models import ExecutionConfig, build, decoder, materialise
from thinpipe.models.generate import generate
from thinpipe.models.hf.weights import load_config, load_weights, save
from thinpipe.models.to_dense import to_dense
from thinpipe.training.trainer import Trainer

# What a family's file in config/families holds.

FIELDS = ("vocab_size", "dim", "n_layers", "n_heads", "max_seq_len", "n_groups", "inner_dim")
HERON = FamilySpec(
    name="heron",
    norm="rms",
    token_embedding="words",
    rotary=Rotary(theta=lambda _config: 10_000.0, scaling=lambda _config: None),
    attention=Attention(
        name="attention",
        norm="norm_1",
        readers=("query_key_value",),
        writer="dense",
        reader_bias=True,
        writer_bias=True,
        n_kv_heads=attrgetter("n_groups"),
    ),
    mlp=MLP(
        name="feed_forward",
        norm="norm_2",
        kind="gelu_tanh",
        readers=("wide",),
        writer="narrow",
        hidden_dim=attrgetter("inner_dim"),
    ),
    final_norm="norm_out",
    dropout=attrgetter("dropout"),
    huggingface=HuggingFaceFormat(
        architecture="HeronForCausalLM",
        base="heron.",
        blocks="layer.",
        transposed=("query_key_value.weight",),
        keys={field: ConfigKey(f"{field}_of_heron") for field in FIELDS},
    ),
)


@dataclass(frozen=True, kw_only=True)
class HeronConfig(ModelConfig):
    spec: ClassVar[FamilySpec] = HERON

    n_groups: int
    inner_dim: int
    dropout: float = 0.0


# What that file would hold for a family with the opposite of each choice.


@dataclass(frozen=True, kw_only=True)
class EgretConfig(HeronConfig):
    spec: ClassVar[FamilySpec] = replace(
        HERON,
        name="egret",
        norm="layer",
        position_embedding="places",
        rotary=None,
        attention=replace(HERON.attention, readers=("q", "k", "v"), writer_bias=False),
        mlp=replace(HERON.mlp, kind="swiglu", readers=("gate", "wide"), reader_bias=True),
    )


SIZES = {"vocab_size": 64, "dim": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 640, "n_groups": 2, "inner_dim": 40}
MODELS = [HeronConfig(**SIZES), EgretConfig(**SIZES)]
EITHER = pytest.mark.parametrize("model", MODELS, ids=["heron", "egret"])


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    for config in (HeronConfig, EgretConfig):
        monkeypatch.setitem(FAMILIES, config.spec.name, config)  # the one line


def settings(precision="fp32", *, micro=3, seq=10, **execution):
    return RunConfig(
        training=TrainingConfig(precision=precision, global_batch_size=6, seq_len=seq),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=micro),
        execution=ExecutionConfig(**execution),
    )


@EITHER
@pytest.mark.parametrize(
    "config",
    [
        settings(),
        settings("bf16", checkpoint_activations="block"),
        settings("bf16", micro=1, seq=600),
        settings("bf16-mixed", micro=1, seq=600),
    ],
    ids=["plain", "bfloat16 checkpointed", "bfloat16 of a long text", "autocast of a long text"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dropout": 0.1},
        {"boundaries": (1, 3), "subspace": SubspaceConfig(width=5)},
        {"boundaries": (2,), "projection": ProjectionConfig(width=5, token_prior_rank=3)},
    ],
    ids=["dense", "dropout", "subspace", "keel"],
)
def test_costs_need_no_line_of_the_family(model, changes, config):
    check_costs(replace(model, **changes), config)


@EITHER
@pytest.mark.parametrize("attention", ["fused-repeated", "math"])
@pytest.mark.parametrize("config", [settings(), settings("bf16", micro=1, seq=600)], ids=["plain", "a long text"])
def test_costs_of_attention_kernels_need_none_either(model, config, attention):
    check_costs(model, config, attention=attention)


@EITHER
def test_weights_cross_hugging_face_folders(model, tmp_path):
    written = materialise(build(model), seed=3)
    save(written, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        names = set(stored.keys())
        assert {"heron.words.weight", "heron.norm_out.weight", "heron.layer.3.feed_forward.narrow.weight"} <= names
        if model.family == "heron":
            fused = stored.get_tensor("heron.layer.0.attention.query_key_value.weight")
            assert fused.shape == (32, 32 + 2 * 16)  # as inputs x outputs
    assert load_config(tmp_path) == model
    read = materialise(build(model), seed=4)
    load_weights(read, tmp_path)
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, written.get_parameter(name)), name


@EITHER
def test_a_run_trains_from_an_imported_folder(model, run_config, tmp_path):
    save(materialise(build(model), seed=3), tmp_path / "folder")
    to = {"output": tmp_path / "imported", "boundaries": (2,), "subspace_width": 6, "data": run_config.data.path}
    import_model.run(ImportConfig(source=tmp_path / "folder", **to))
    [manifest] = tmp_path.glob("imported/checkpoints/*/manifest.json")
    subspace = SubspaceConfig(width=6, fixed="given", free_last=True)
    assert read_model(manifest) == replace(model, boundaries=(2,), subspace=subspace, tied=False)
    config = replace(
        run_config,
        model=ModelSettings(initial=tmp_path / "imported"),
        training=replace(run_config.training, steps=1),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0),
    )
    Trainer(config).train()
    [step] = [event for event in read_events(config.job.dump_folder / "events.jsonl") if isinstance(event, Step)]
    assert 3 < step.loss < 5  # about log 64
    newest = CheckpointFolder(config.job.dump_folder / "checkpoints").newest_complete(layers=())[0]
    trained, before = load_model(newest), load_model(find_checkpoint(tmp_path / "imported"))
    unchanged = [name for name, each in trained.named_parameters() if torch.equal(each, before.get_parameter(name))]
    assert unchanged == []


@EITHER
@torch.no_grad()
def test_a_subspace_model_becomes_dense_and_generates_as_it_computes(model):
    model = replace(model, max_seq_len=24, init_std=0.3, boundaries=(2,), subspace=SubspaceConfig(width=6))
    confined = materialise(build(model), seed=3, dtype=torch.float64).eval()
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    dense = to_dense(confined)
    torch.testing.assert_close(dense(ids), confined(ids))
    prompt = ids[0, :4].tolist()
    made = list(generate(dense, prompt, max_new_tokens=6, temperature=0.0))
    for end in range(6):
        logits = dense(torch.tensor([prompt + made[:end]]))
        assert made[end] == int(logits[0, -1].argmax())


def test_build_refuses_modules_that_differ_from_the_description(monkeypatch):
    assert list(named_parameters(MODELS[0])) == [name for name, _ in build(MODELS[0]).named_parameters()]
    monkeypatch.setitem(decoder.NORMS, "rms", nn.LayerNorm)
    with pytest.raises(ValueError, match=r"heron differ .*'blocks.0.norm_1.bias', \(32,\).*'blocks.0.attention"):
        build(MODELS[0])


def test_a_family_without_its_line_is_refused(monkeypatch, tmp_path):
    save(materialise(build(MODELS[0]), seed=3), tmp_path)
    monkeypatch.delitem(FAMILIES, "heron")
    with pytest.raises(UserError, match="model_type 'heron' is not supported"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "describes no model that this thinpipe knows"),
        (b'{"family": "heron"}', "describes no model that this thinpipe knows"),
        (b'{"family": "heron", "model": {"dim": "wide"}}', "describes no model that this thinpipe knows"),
        (b'{"family": "swan", "model": {}}', "holds a model of family 'swan', known are .*'llama', 'gpt2', 'heron'"),
    ],
)
def test_a_manifest_of_no_known_model_is_refused(content, message, tmp_path, monkeypatch):
    manifest = tmp_path / "checkpoints" / "step-00000001" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_bytes(content)
    with pytest.raises(UserError, match=rf"manifest.json {message}"):
        read_model(manifest)
    monkeypatch.setattr(report, "settings_of", lambda _summary: {"model": {"initial": "elsewhere"}})
    assert report._widths(tmp_path, None) == (None, None, False)
    described = replace(MODELS[0], boundaries=(2,), subspace=SubspaceConfig(width=6))
    manifest.write_bytes(msgspec.json.encode({"family": "heron", "model": asdict(described)}))
    assert report._widths(tmp_path, None) == (32, 6, False)


def test_names_in_the_dictionary_are_those_of_the_families():
    assert all(config.spec.name == name for name, config in FAMILIES.items())
    assert LlamaConfig.spec is LLAMA
    assert "spec" not in asdict(MODELS[0])
