"""A base in 4 or 8 bits: the library's own bits and gradients, whole or in segments."""

from dataclasses import replace

import peft
import pytest
import torch
import transformers

from tests.huggingface.models import save_model, small_config
from tests.huggingface.runs import BATCH, LORA, MICROBATCH, batch, run_config
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.core.errors import UserError
from thinpipe.models.hf.lora import peft_config
from thinpipe.models.hf.pretrained_config import read_model
from thinpipe.models.hf.quantised import as_quantised, is_quantised, quantisation
from thinpipe.training.engine import Engine

CPU = torch.device("cpu")
NO_DROPOUT = replace(LORA, lora_dropout=0.0)


def theirs(folder, kind, dtype=torch.float32):
    """peft on transformers' model, quantised by the library as its users write it."""
    how = {
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "int8": {"load_in_8bit": True},
    }[kind]
    how |= {"bnb_4bit_compute_dtype": dtype} if kind == "nf4" else {}
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=transformers.BitsAndBytesConfig(**how)
    )
    return peft.get_peft_model(whole, peft_config(NO_DROPOUT)).train()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "gpt2"])
def test_gradients_of_adapters_are_those_of_peft_on_the_whole(model_type, kind, tmp_path):
    """In four segments, over several micro-batches: none differs."""
    save_model(small_config(model_type, tie_word_embeddings=False), tmp_path)
    model = replace(read_model(tmp_path, (2, 4, 6)), lora=NO_DROPOUT, quantize_base=kind)
    engine = Engine(run_config("exact"), model)
    name_of = engine.model.segments[0].huggingface_name
    adapters = {f"base_model.model.{name_of(name)}": p for name, p in engine.parameters.items()}
    whole = theirs(tmp_path, kind)
    wanted = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    assert wanted.keys() == adapters.keys()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapters.items():  # also those that begin as zeros
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            wanted[name].copy_(parameter)
    parts = torch.from_numpy(batch(model.vocab_size)).split(MICROBATCH)
    engine.model.train()
    loss = engine.runner.gradients(0, parts)
    losses = []
    for ids in parts:
        logits = whole(input_ids=ids[:, :-1], use_cache=False).logits
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").mean()
        each.backward()
        losses.append(each.item())
    assert loss == sum(losses) / len(losses)
    different = [n for n, p in wanted.items() if not torch.equal(adapters[n].grad, p.grad / (BATCH // MICROBATCH))]
    assert different == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_librarys_and_merging_rounds_as_it_does(dtype, tmp_path):
    whole = save_model(small_config("qwen3", tie_word_embeddings=False), tmp_path)
    engine = Engine(
        run_config("exact", precision="fp32" if dtype == torch.float32 else "bf16"),
        replace(read_model(tmp_path, (4,)), lora=NO_DROPOUT, quantize_base="nf4"),
    )
    found = {name: p for name, p in engine.model.named_parameters() if not p.requires_grad}
    wanted = dict(theirs(tmp_path, "nf4", dtype).named_parameters())
    name_of, compared = engine.model.segments[0].huggingface_name, 0
    for name, parameter in found.items():
        assert torch.equal(parameter, wanted[f"base_model.model.{name_of(name)}"])
        if parameter.dtype == torch.uint8:
            matrix = whole.get_parameter(name_of(name).replace(".base_layer", "")).to(dtype)
            from bitsandbytes.functional import dequantize_4bit

            assert torch.equal(as_quantised(matrix, "nf4"), dequantize_4bit(parameter.data, parameter.quant_state))
            compared += 1
    assert compared == 8 * 7
    assert found["last.lm_head.weight"].dtype == dtype


def test_only_matrices_of_blocks_are_quantised(tmp_path):
    save_model(small_config("qwen3"), tmp_path)
    model = replace(read_model(tmp_path, (4,)), lora=LoraConfig(r=2, target_modules=("q_proj",)), quantize_base="int8")
    engine = Engine(run_config("exact"), model)
    names = {name for s in engine.model.segments for name, module in s.named_modules() if is_quantised(module)}
    assert len(names) == 8 * 7
    assert all(name.startswith("blocks.") for name in names)


def test_a_device_without_kernels_is_refused():
    with pytest.raises(UserError, match="works on cpu, cuda, xpu, not on mps"):
        quantisation("nf4", torch.device("mps"), torch.float32)
    assert quantisation(None, torch.device("mps"), torch.float32) is None
    assert quantisation("int8", CPU, torch.float32).load_in_8bit
