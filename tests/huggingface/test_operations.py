"""Operations of training steps on Hugging Face models by the cost model, against torch's own count."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.huggingface.run_files import LORA, run_of
from thinpipe.config import model_family
from thinpipe.config.model import ExecutionConfig
from thinpipe.models.hf import decoder
from thinpipe.models.hf.model_of_run import model_of_run
from thinpipe.models.protocol import build_model
from thinpipe.planning import stored_costs
from thinpipe.planning.segment_costs import segment_costs
from thinpipe.planning.stored_model import stored_model_of

CUTS, TOKENS = (2, 5), 128


def run_on(base, tokens, folder, way, checkpointing):
    config = run_of(
        base, tokens, folder, way, cuts=CUTS, execution=ExecutionConfig(checkpoint_activations=checkpointing)
    )
    lora = None if config.lora is None else replace(LORA, lora_dropout=0.0)
    return replace(config, training=replace(config.training, seq_len=TOKENS), lora=lora)


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize("way", ["full", "LoRA"])
@pytest.mark.parametrize(("model_type", "has_many_logits"), [("qwen3", False), ("qwen3", True), ("gpt2", False)])
def test_operations_are_those_that_torch_counts(
    model_type, has_many_logits, way, checkpointing, base_of, tune_tokens, tmp_path, monkeypatch
):
    if has_many_logits:
        for module in (decoder, stored_costs):
            monkeypatch.setattr(module, "MAX_LOGITS", TOKENS * model_family._ROW_MULTIPLE)
    config = run_on(base_of(model_type, attn_pdrop=0.0), tune_tokens, tmp_path / "run", way, checkpointing)
    model = build_model(model_of_run(config))
    model.set_execution(config.execution)
    ids_BW = torch.randint(3, 290, (config.microbatch_size, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    state = None
    costs = segment_costs(stored_model_of(config), config)
    # The lowest adapters need no gradient of their input, and a second forward pass ends when it has all it needs.
    close = 0.03 if (way, checkpointing) == ("full", "none") else 0.15
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of CPUs is not among those that torch counts
        for cost, segment in zip(costs, model.segments, strict=True):
            segment.materialise(seed=0)
            with FlopCounterMode(display=False) as counter:
                out = segment(ids_BW[:, :-1], state, dropout_seed=1, targets_BT=ids_BW[:, 1:])
                out.mean().backward()
            assert cost.flops_per_token == pytest.approx(counter.get_total_flops() / ids_BW[:, 1:].numel(), rel=close)
            state = out.detach().requires_grad_()
