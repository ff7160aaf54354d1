"""Several processes over a Hugging Face model: equal to the twin, which is equal to transformers' own model."""

import json
import shutil

import numpy as np
import pytest
import torch

from tests.huggingface.models import save_model, small_config, their_gradients
from tests.huggingface.runs import BATCH, BOUNDARIES, LORA, MICROBATCH, batch, digest, run_config, train
from tests.transport.processes import results, start
from thinpipe.models.hf.pretrained_config import read_model
from thinpipe.models.hf.probe_cache import require_probed
from thinpipe.training.engine import Engine

CUTS = (2, 4, 6)


def untied(model_type):
    return small_config(model_type, tie_word_embeddings=False)


def run_processes(folder, count, schedule):
    require_probed(read_model(folder, CUTS))  # else the processes do, and read tensors of the small model
    return results(start(count, "tests.huggingface.worker", folder, json.dumps(CUTS), schedule))


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "gpt2"])
def test_the_twin_has_the_loss_and_the_gradients_of_transformers_own_model(model_type, tmp_path):
    whole = save_model(untied(model_type), tmp_path)
    model = read_model(tmp_path, CUTS)
    engine = Engine(run_config("exact"), model)
    ids_BW = batch(model.vocab_size)
    loss = engine.runner.gradients(0, torch.from_numpy(ids_BW).split(MICROBATCH))
    wanted, gradients = their_gradients(whole.train(), torch.from_numpy(ids_BW), BATCH // MICROBATCH)
    assert loss == wanted
    segment = engine.model.segments[0]
    found = {segment.huggingface_name(name): digest(p.grad) for name, p in engine.parameters.items()}
    assert found == {name: digest(gradient) for name, gradient in gradients.items()}


@pytest.mark.parametrize(
    ("processes", "schedule"),
    [(2, "1F1B"), *(pytest.param(*case, marks=pytest.mark.long) for case in ((4, "GPipe"), (2, "ZBVZeroBubble")))],
)
def test_processes_equal_the_twin_bit_for_bit(processes, schedule, tmp_path):
    folder = tmp_path / "model"
    save_model(untied("qwen3"), folder)
    parts = run_processes(folder, processes, schedule)
    for name, twin in twins(folder):
        found = [part["results"][name] for part in parts]
        assert all(part["seen"] == json.loads(json.dumps(twin["seen"])) for part in found)
        assert all(part["validation"] == twin["validation"] for part in found)
        for what in ("gradients", "weights", "moments"):
            together = {key: value for part in found for key, value in part[what].items()}
            assert together == twin[what], (name, what)
    refuse_shared_reads(folder, parts)


def twins(folder):
    for name in BOUNDARIES:
        yield name, train(folder, CUTS, name)
    yield "LoRA", train(folder, CUTS, "rotated", lora=LORA)
    yield "packed", train(folder, CUTS, "rotated", packing=True)


def refuse_shared_reads(folder, parts):
    """Every tensor is read by exactly one process, and no process opens the files of all."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    read = [name for part in parts for name in part["read"]]
    assert sorted(read) == sorted(index)
    for part in parts:
        assert set(part["files"]) == {index[name] for name in part["read"]}
        assert len(part["files"]) < len(set(index.values()))


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "smollm3", "mixtral", "gpt2"])
@pytest.mark.parametrize(("processes", "schedule"), [(2, "1F1B"), (4, "1F1B"), (4, "GPipe"), (2, "Interleaved1F1B")])
def test_more_models_and_schedules_equal_the_twin_bit_for_bit(model_type, processes, schedule, tmp_path):
    folder = tmp_path / "model"
    save_model(untied(model_type), folder)
    parts = run_processes(folder, processes, schedule)
    for name, twin in twins(folder):
        for what in ("gradients", "weights", "moments"):
            together = {key: value for part in parts for key, value in part["results"][name][what].items()}
            assert together == twin[what], (name, what)


def test_boundaries_that_round_change_the_gradients_but_not_by_much(tmp_path):
    """Otherwise the comparison with the twin would compare uncompressed messages."""
    save_model(untied("qwen3"), tmp_path)
    gradients = {}
    for name in BOUNDARIES:
        engine = Engine(run_config(name), read_model(tmp_path, CUTS))
        engine.runner.gradients(0, torch.from_numpy(batch(engine.model.config.vocab_size)).split(MICROBATCH))
        gradients[name] = np.concatenate([p.grad.flatten().numpy() for p in engine.parameters.values()])
    exact = gradients.pop("exact")
    for found in gradients.values():
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert 1e-4 < error < 0.2


def test_a_tied_head_is_trained_as_a_copy_of_the_embedding(tmp_path):
    whole = save_model(small_config("qwen3", tie_word_embeddings=True), tmp_path)
    engine = Engine(run_config("exact"), read_model(tmp_path, CUTS))
    table, head = (engine.parameters[name] for name in ("first.embed_tokens.weight", "last.lm_head.weight"))
    assert table is not head
    assert torch.equal(table, head)
    assert torch.equal(table, whole.get_input_embeddings().weight)
    ids_BW = torch.from_numpy(batch(engine.model.config.vocab_size))[:MICROBATCH]
    engine.runner.gradients(0, [ids_BW])  # one micro-batch: then the sum of both is transformers' gradient
    _, gradients = their_gradients(whole, ids_BW, 1)
    assert torch.equal(table.grad + head.grad, gradients["model.embed_tokens.weight"])


def test_a_process_needs_only_the_files_with_its_own_tensors(tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    save_model(untied("llama"), whole)
    shutil.copytree(whole, part)
    index = json.loads((whole / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if name.startswith(("model.layers.2.", "model.layers.3."))}
    for file in set(index.values()) - needed:
        (part / file).unlink()
    [own, expected] = [read_segment(folder, 1) for folder in (part, whole)]
    assert all(torch.equal(p, expected[name]) for name, p in own.items())
    assert len(needed) < len(set(index.values()))


def read_segment(folder, index):
    from thinpipe.models.hf.decoder import HuggingFaceModel

    segment = HuggingFaceModel(read_model(folder, CUTS)).segments[index].materialise(seed=0)
    return dict(segment.named_parameters())
