"""What segments are said to need, against real steps: their peak memory, and torch's own count of operations."""

import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.train.step_memory import VOCABULARY, read_peaks, run_config
from thinpipe.config.families import PRESETS
from thinpipe.config.run import ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.models import build, materialise
from thinpipe.planning.messages import message_sizes
from thinpipe.planning.segment_costs import segment_costs, segment_needs, shared_nbytes
from thinpipe.subspace import GrassmannTracker

FAMILIES = ("llama-tiny", "gpt2-tiny")


def needs_of(model, config, processes=None):
    return segment_needs(segment_costs(model, config), config, processes=processes)


def case(
    preset,
    *,
    dim=256,
    layers=4,
    batch=4,
    micro=2,
    seq=256,
    subspace=None,
    projection=None,
    boundaries=(),
    precision="fp32",
    **execution,
):
    model = {"preset": preset, "dim": dim, "n_layers": layers, "n_heads": dim // 64, "max_seq_len": 1024}
    model |= {"subspace": subspace or {}, "projection": projection or {}, "boundaries": list(boundaries)}
    if preset.startswith("llama"):
        model |= {"n_kv_heads": dim // 128, "hidden_dim": 8 * dim // 3 // 32 * 32}
    return {
        "model": model,
        "training": {"global_batch_size": batch, "seq_len": seq, "device": "cpu", "precision": precision},
        "parallelism": {"pipeline_parallel_microbatch_size": micro},
        "execution": execution,
    }


SIZES = {
    "activations": {"batch": 2, "micro": 1, "seq": 512},
    "weights": {"dim": 640, "layers": 3, "batch": 2, "micro": 1, "seq": 128},
    "one micro-batch": {"dim": 384, "batch": 2, "micro": 2, "seq": 256},
}
CONFINED = {"width": 32, "free_last": False}
KEEL = {"width": 32, "token_prior_rank": 64, "token_prior_window": 4, "embedding_rank": 64}
PROJECTION_CONFIGS = {
    "keel": KEEL,
    "learned": {"kind": "learned", "width": 32, "token_prior_rank": 64},
    "bottleneck": {"kind": "bottleneck", "width": 32},
}
CASES = {
    **{
        (preset, "dense" if subspace is None else "subspace", size): case(preset, subspace=subspace, **fields)
        for preset in FAMILIES
        for subspace in (None, CONFINED)
        for size, fields in SIZES.items()
    },
    ("llama-tiny", "bfloat16"): case("llama-tiny", dim=384, batch=2, micro=1, precision="bf16-mixed"),
    ("gpt2-tiny", "checkpointed"): case(
        "gpt2-tiny", layers=6, batch=2, micro=1, seq=512, checkpoint_activations="block"
    ),
    ("gpt2-tiny", "segment"): case(
        "gpt2-tiny", layers=6, batch=2, micro=1, seq=512, boundaries=(3,), checkpoint_activations="segment"
    ),
    ("llama-tiny", "vocabulary"): {
        **case("llama-tiny", dim=128, layers=2, batch=2, micro=1, seq=512),
        "vocabulary": 2**17,
    },
    ("llama-tiny", "keel"): case("llama-tiny", batch=2, micro=1, seq=512, projection=KEEL, boundaries=(1, 3)),
    ("llama-tiny", "cut"): case("llama-tiny", batch=2, micro=1, seq=512, subspace={"width": 32}, boundaries=(1, 3)),
}


FEW = {
    ("llama-tiny", "subspace", "activations"),
    ("gpt2-tiny", "dense", "weights"),
    ("llama-tiny", "bfloat16"),
    ("gpt2-tiny", "checkpointed"),
    ("gpt2-tiny", "segment"),
    ("llama-tiny", "vocabulary"),
    ("llama-tiny", "keel"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the highest resident set can be reset on Linux only")
@pytest.mark.parametrize(
    "names", [sorted(FEW), pytest.param(sorted(CASES.keys() - FEW), marks=pytest.mark.long)], ids=["few", "others"]
)
def test_memory_is_that_of_a_real_step(names):
    peaks = dict(zip(names, read_peaks([CASES[name] for name in names]), strict=True))
    wrong = {}
    for name in names:
        sections = dict(CASES[name])
        vocabulary = sections.pop("vocabulary", VOCABULARY)
        config = run_config(sections)
        model = config.model.resolve(vocabulary)
        said = shared_nbytes(model, config) + sum(n.memory_nbytes for n in needs_of(model, config, processes=1))
        print(
            f"{' '.join(name):32} said {said / 1e6:6.1f} MB, was {peaks[name] / 1e6:6.1f} MB: {said / peaks[name]:.3f}"
        )
        if not 0.88 < said / peaks[name] < 1.2:
            wrong[name] = said / peaks[name]
    assert not wrong


@pytest.mark.parametrize("preset", FAMILIES)
@pytest.mark.parametrize("subspace", [None, CONFINED, {"width": 64}], ids=["dense", "confined", "free_last"])
@pytest.mark.parametrize("checkpointing", ["none", "block", "segment"])
def test_operations_are_those_that_torch_counts(preset, subspace, checkpointing):
    check_operations(preset, subspace=subspace, checkpointing=checkpointing)


@pytest.mark.parametrize("checkpointing", ["none", "segment"])
@pytest.mark.parametrize("projection", PROJECTION_CONFIGS.values(), ids=PROJECTION_CONFIGS)
def test_flops_of_projections_are_counted(projection, checkpointing):
    check_operations("llama-tiny", projection=projection, checkpointing=checkpointing)


def check_operations(preset, *, subspace=None, checkpointing="none", **fields):
    sections = case(
        preset,
        batch=2,
        micro=2,
        seq=256,
        subspace=subspace,
        boundaries=(1, 3),
        checkpoint_activations=checkpointing,
        **fields,
    )
    config = run_config(sections)
    model = materialise(build(config.model.resolve(512)), seed=0)
    model.set_execution(config.execution)
    if subspace is not None:
        model.segments[-1].on_gradient = GrassmannTracker(model.space.basis).observe
    ids_BW = torch.randint(512, (2, 257), generator=torch.Generator().manual_seed(0))
    state = None
    close = 0.02 if checkpointing == "none" else 0.1  # torch ends a second forward pass when it has all it needs
    # The fused kernel of CPUs is not among those that torch counts.
    with sdpa_kernel(SDPBackend.MATH):
        for index, (need, segment) in enumerate(zip(needs_of(model.config, config), model.segments, strict=True)):
            with FlopCounterMode(display=False) as counter:
                out = segment(ids_BW[:, :-1], state, targets_BT=ids_BW[:, 1:])
                out.mean().backward()
            assert need.flops_per_token == pytest.approx(counter.get_total_flops() / (2 * 256), rel=close), index
            state = out.detach().requires_grad_()


def test_micro_batches_under_way_cost_memory():
    """1F1B: one more in every segment before; GPipe: all of them everywhere."""
    config = run_config(case("llama-tiny", batch=8, micro=1, boundaries=(1, 2, 3)))
    model = replace(config.model.resolve(512), n_layers=4)
    alone = [need.memory_nbytes for need in needs_of(model, config, processes=1)]
    piped = [need.memory_nbytes for need in needs_of(model, config)]
    one = (piped[2] - alone[2]) / 1
    assert [(p - a) / one for p, a in zip(piped, alone, strict=True)][1:] == [2, 1, 0]
    two = [need.memory_nbytes for need in needs_of(model, config, processes=2)]
    assert [(t - a) / one for t, a in zip(two, alone, strict=True)][1:] == [1, 1, 0]
    gpipe = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_schedule="GPipe"))
    assert (needs_of(model, gpipe)[2].memory_nbytes - alone[2]) / one == 7
    more = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_extra_microbatches=1))
    assert (needs_of(model, more)[1].memory_nbytes - alone[1]) / one == 4


@pytest.mark.parametrize(("subspace", "width"), [(None, 256), (CONFINED, 32)], ids=["dense", "confined"])
def test_a_checkpointed_block_keeps_what_enters_it_and_no_more(subspace, width):
    def kept(layers):
        config = run_config(case("llama-tiny", layers=layers, subspace=subspace, checkpoint_activations="block"))
        [cost] = segment_costs(config.model.resolve(512), config)
        return cost.activation_nbytes

    assert kept(5) - kept(4) == 2 * 256 * width * 4


def test_traffic_is_what_messages_are_long():
    config = run_config(case("llama-tiny", subspace={"width": 32}, boundaries=(1,)))
    traffic = message_sizes(config.model.resolve(VOCABULARY), config).traffic(config)
    assert traffic.backward_nbytes == 32 * 4
    assert 32 * 4 + 2 < traffic.forward_nbytes < 32 * 4 + 2.1  # ids of two bytes, one more per sequence than tokens
    uncut = run_config(case("llama-tiny"))
    assert message_sizes(uncut.model.resolve(VOCABULARY), uncut).traffic(uncut).bits == 0


@pytest.mark.parametrize(("precision", "least", "most"), [("fp32", 16, 17.5), ("bf16-mixed", 18, 20), ("bf16", 6, 7)])
def test_a_large_model_takes_no_memory_to_plan(precision, least, most):
    """bf16-mixed: 2 bytes a weight for copies, and as many for their gradients, where these outweigh activations."""
    model = replace(PRESETS["llama-8b"], boundaries=(8, 16, 24))
    parallelism = ParallelismConfig(pipeline_parallel_microbatch_size=1)
    config = RunConfig(training=TrainingConfig(precision=precision), parallelism=parallelism)
    needs = needs_of(model, config)
    assert sum(need.flops_per_token for need in needs) == pytest.approx(6 * 7.5e9, rel=0.05)
    assert least < sum(need.memory_nbytes for need in needs) / 8.03e9 < most
