"""The plans of tuning published models stand in the docs as they are made, and their parts are what arithmetic says."""

import json

import pytest

from benchmarks.tuning_plans import MODELS, PAGE, PUBLISHED, WAYS, plan_of, with_tables

TRAINED_MILLIONS = {"Qwen3-0.6B": 10, "Llama-3.1-8B": 42, "Qwen3-32B": 134, "Llama-3.1-70B": 207}
WEIGHTS_MILLIONS = {"Qwen3-0.6B": 596, "Llama-3.1-8B": 8030, "Qwen3-32B": 32762, "Llama-3.1-70B": 70554}


@pytest.mark.long
def test_the_tables_are_those_of_the_cost_model():
    page = PAGE.read_text("utf-8")
    assert with_tables(page) == page, "run python -m benchmarks.tuning_plans"


@pytest.mark.parametrize("name", MODELS)
def test_adapters_weights_and_downloads_are_what_arithmetic_says(name):
    stated = json.loads((PUBLISHED / name / "config.json").read_text("utf-8"))
    loads = {way: plan_of(name, way)[0].machine_loads for way in WAYS}
    width, layers, mlp = (stated[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    heads = stated["num_attention_heads"]
    each = stated.get("head_dim", width // heads)
    queries, keys = heads * each, stated["num_key_value_heads"] * each
    sides = 2 * (width + queries) + 2 * (width + keys) + 3 * (width + mlp)
    trained = sum(load.parameters for load in loads["LoRA"])
    assert trained == 16 * layers * sides
    assert round(trained / 1e6) == TRAINED_MILLIONS[name]
    assert sum(load.commit_nbytes for load in loads["LoRA"]) == 12 * trained
    copied = stated["vocab_size"] * width if stated.get("tie_word_embeddings") else 0
    count = sum(load.download_nbytes for load in loads["LoRA"]) // 2
    assert round((count - copied) / 1e6) == WEIGHTS_MILLIONS[name]
    assert sum(load.memory.frozen for load in loads["LoRA"]) == 2 * count
    tables = 2 * stated["vocab_size"] * width
    matrices = layers * (width * (2 * queries + 2 * keys) + 3 * width * mlp)
    quantised = sum(load.memory.frozen for load in loads["LoRA on nf4"])
    assert quantised == pytest.approx(2 * tables + 0.516 * matrices, rel=2e-3)
    assert sum(load.memory.frozen for load in loads["in full"]) == 0
    assert sum(load.parameters for load in loads["in full"]) == count
