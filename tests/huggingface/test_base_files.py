"""A base on a model hub: in the cache of this machine, since tests download nothing."""

import shutil

import huggingface_hub.constants
import pytest
import torch

from tests.huggingface.models import save_model, small_config
from tests.huggingface.run_files import run_of
from thinpipe.core.errors import UserError
from thinpipe.models.hf.base_files import base_file, pinned_source
from thinpipe.models.hf.base_statement import base_sha256, tensor_sha256
from thinpipe.models.hf.decoder import HuggingFaceModel
from thinpipe.models.hf.model_of_run import model_of_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A model in the cache as the library huggingface_hub keeps it."""
    kept = tmp_path / "cache" / "models--someone--small"
    save_model(small_config("qwen3"), kept / "snapshots" / COMMIT)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return kept / "snapshots" / COMMIT


def test_a_name_is_pinned_to_its_commit_and_read_from_the_cache(cached, tmp_path):
    config = model_of_run(run_of("hf:someone/small", tmp_path, tmp_path / "run"))
    assert config.source == f"hf:someone/small@{COMMIT}"
    assert model_of_run(run_of(config.source, tmp_path, tmp_path / "run")) == config
    local = model_of_run(run_of(cached, tmp_path, tmp_path / "run"))
    for index in (0, 3):
        ours, theirs = (HuggingFaceModel(each).segments[index].materialise(seed=0) for each in (config, local))
        assert ours.base_hashes == theirs.base_hashes != {}
        pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
        assert all(name == other and torch.equal(p, q) for (name, p), (other, q) in pairs)


def test_a_process_asks_for_the_files_with_its_own_tensors_only(cached, tmp_path):
    config = model_of_run(run_of("hf:someone/small", tmp_path, tmp_path / "run"))
    model = HuggingFaceModel(config)
    shards = sorted(cached.glob("model-*.safetensors"))
    shards[0].unlink()  # with the embedding
    model.segments[2].materialise(seed=0)
    with pytest.raises(UserError):
        model.segments[0].materialise(seed=0)


@pytest.mark.parametrize("name", ["hf:someone/else", "hf:someone/small@v2"])
def test_what_is_not_in_the_cache_is_refused_by_name(name, cached):  # noqa: ARG001
    with pytest.raises(UserError, match=f"{name} is not in the cache"):
        pinned_source(name)


def test_a_small_file_is_found_or_not(cached):
    assert base_file("hf:someone/small", "config.json").parent == cached
    assert base_file("hf:someone/small", "tokenizer.json") is None
    assert base_file(str(cached), "config.json") == cached / "config.json"
    shutil.rmtree(cached)
    with pytest.raises(UserError):
        pinned_source("hf:someone/small")


def test_a_hash_depends_on_name_type_shape_and_every_number():
    ones = torch.ones(2, 3)
    others = [
        ("b", ones),
        ("a", ones.bfloat16()),
        ("a", ones.view(3, 2)),
        ("a", ones.index_fill(1, torch.tensor(2), 2)),
    ]
    hashes = {tensor_sha256(name, tensor) for name, tensor in [("a", ones), *others]}
    assert len(hashes) == 5
    first, second = sorted(hashes)[:2]
    assert base_sha256([first, second]) == base_sha256([second, first, first]) != base_sha256([first])
