"""Model types of the installed transformers with their default configurations: those that passed still pass, and what
is refused is refused with its reason."""

import pytest

from benchmarks.huggingface_types import probe_type, table
from thinpipe.models.hf.probe import CHECKS, Check, ProbeResult

PASSING = """
    afmoe apertus arcee aria_text axk1 axk2 bamba beam biogpt bitnet bloom codegen cohere cohere2 cohere2_moe
    cwm deepseek_v3 deepseek_v32 diffllama doge ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_mamba
    flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hy_v3 hyperclovax jais2 jamba jetmoe kolibri1 laguna lfm2 llama
    mamba mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral3 mistral mixtral
    nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe persimmon phi phi3 qwen2 qwen2_moe qwen3
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 solar_open stablelm
    starcoder2 vaultgemma youtu
"""

REFUSED = {
    "bart": "has an encoder",
    "bert": "no pipeline plan",
    "deepseek_v4": "no segment would own model.hc_head",
    "gemma3": "wraps a language model",
    "opt": "no pipeline plan",
    "phimoe": "router_jitter_noise",
    "zamba2": "no pipeline plan",
    "zaya": "no pipeline plan",
}


@pytest.mark.long
@pytest.mark.parametrize("model_type", PASSING.split())
def test_a_model_type_that_passed_still_passes(model_type):
    assert probe_type(model_type).refusal is None


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_type_is_refused_with_its_reason(model_type):
    assert REFUSED[model_type] in probe_type(model_type).refusal


def test_the_table_lists_what_passes_and_why_others_do_not():
    checks = [
        Check(name=name, works=name != "packing", detail="", is_required=needed) for name, (needed, _) in CHECKS.items()
    ]
    refused = ProbeResult(
        model_type="b", checks=(Check(name="segments", works=False, detail="has no plan", is_required=True),)
    )
    lines = table([("a", ProbeResult(model_type="a", checks=tuple(checks))), ("b", refused)]).splitlines()
    assert any("1 of 2 types" in line for line in lines)
    assert "| type | recomputation | LoRA | packing | dropout |" in lines
    assert "| a | yes | yes | no | yes |" in lines
    assert "| b | has no plan |" in lines
