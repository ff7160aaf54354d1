"""What would make a run fit: settings in order of harm, no more of them than needed, and each with its true figure."""

import re
from dataclasses import replace

import pytest

from thinpipe.config.families import PRESETS
from thinpipe.config.run import ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.core.errors import UserError
from thinpipe.planning.calibration import Calibration
from thinpipe.planning.fitting import LocalFit, Need, machines_needed, memory_of_processes, ways_to_fit
from thinpipe.planning.memory_budget import CONTEXT_NBYTES, FRAGMENTATION_SHARE, PROCESS_NBYTES, MemoryBudget
from thinpipe.planning.segment_costs import memory_nbytes, segment_costs, segment_needs, shared_nbytes

MODEL = replace(PRESETS["llama-150m"], boundaries=(4, 8, 11))
GB = 10**9
HERE = MemoryBudget(place="here", free_nbytes=GB)


def run_config(**training):
    fields = {"global_batch_size": 8, "seq_len": 1024, "precision": "fp32", **training}
    return RunConfig(training=TrainingConfig(**fields))


def fit(free, model=MODEL, **fields):
    return LocalFit(model=model, budget=MemoryBudget(place="here", free_nbytes=free), ranks=(0,), **fields)


def needed(config, model=MODEL):
    return memory_of_processes(config, model, HERE)[0].total


def with_settings(config, *, micro=None, checkpointed=None, precision=None):
    config = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_microbatch_size=micro))
    if checkpointed:
        config = replace(config, execution=replace(config.execution, checkpoint_activations=checkpointed))
    return replace(config, training=replace(config.training, precision=precision or config.training.precision))


def test_the_need_of_one_process_is_that_of_its_segments():
    config = with_settings(run_config(), micro=2)
    needs = segment_needs(segment_costs(MODEL, config), config, processes=1)
    assert needed(config) == pytest.approx(
        sum(need.memory_nbytes for need in needs) + shared_nbytes(MODEL, config), rel=0.06
    )


def test_the_mildest_level_that_suffices_is_named():
    config = run_config()
    limit = needed(with_settings(config, micro=2))
    [step] = ways_to_fit(config, fit(limit).judge)
    assert step.saving.setting == "parallelism.pipeline_parallel_microbatch_size = 2"
    assert (step.need.nbytes, step.need.fits) == (limit, True)
    assert fit(limit - 1).judge(step.config).fits is False


def test_a_saving_that_a_later_one_makes_needless_is_left_out():
    """As if only activation checkpointing saved enough, whatever the micro-batch size."""

    def judge(config):
        checkpointed = config.execution.checkpoint_activations != "none"
        return Need(nbytes=config.microbatch_size + (0 if checkpointed else 100), fits=checkpointed)

    assert [step.saving.setting.split(" =")[0] for step in ways_to_fit(run_config(), judge)] == [
        "execution.checkpoint_activations"
    ]


def test_settings_that_save_nothing_or_cannot_be_are_not_proposed():
    assert ways_to_fit(run_config(), lambda _: Need(nbytes=1, fits=False)) == []

    def judge(config):
        if config.microbatch_size < 8:
            raise UserError("no")
        return needs(config)

    needs = fit(1).judge
    assert not any("microbatch" in step.saving.setting for step in ways_to_fit(run_config(), judge))


def test_if_nothing_suffices_all_savings_and_the_number_of_machines_are_named():
    config, small = run_config(), fit(GB)
    steps = ways_to_fit(config, small.judge)
    figures = [step.need.nbytes for step in steps]
    assert len(steps) >= 3
    assert figures == sorted(figures, reverse=True)
    assert not steps[-1].need.fits
    said = small.advice(config)
    assert said[0].startswith("parallelism.pipeline_parallel_microbatch_size = 1 (")
    assert any(line.endswith("still too much") for line in said)
    assert "machines with as much memory" in said[-1]


def test_as_many_machines_as_are_named_hold_the_model_and_one_fewer_do_not():
    config = with_settings(run_config(), micro=1)
    budget = MemoryBudget(place="here", free_nbytes=needed(config) // 2)
    number, fullest = machines_needed(config, MODEL, budget)
    assert 2 < number <= 6
    assert 0 < fullest <= budget.usable_nbytes
    assert machines_needed(config, MODEL, replace(budget, free_nbytes=10**7)) is None
    more, _ = machines_needed(config, MODEL, replace(budget, free_nbytes=fullest - 1)) or (99, 0)
    assert more > number


def test_hosts_with_little_memory_need_more_machines_for_offloaded_state():
    config = with_settings(run_config(), micro=1, checkpointed="block")
    config = replace(config, training=replace(config.training, offload="optimizer"))
    roomy = MemoryBudget(place="card", free_nbytes=int(1.5 * GB), host_free_nbytes=32 * GB)
    poor = replace(roomy, host_free_nbytes=PROCESS_NBYTES + GB // 3)
    assert machines_needed(config, MODEL, poor)[0] > machines_needed(config, MODEL, roomy)[0]


def test_advice_on_machines_counts_the_scores_that_the_device_keeps():
    config = with_settings(run_config(), micro=1)
    card = MemoryBudget(place="card", free_nbytes=int(2.5 * GB), host_free_nbytes=32 * GB)
    fused, scores = (replace(fit(GB), budget=card, attention=kernel).advice(config) for kernel in ("fused", "math"))
    counts = [
        re.search(r"(\d+) machines .* with the settings as they are", "\n".join(said)) for said in (fused, scores)
    ]
    assert int(counts[1][1]) > int(counts[0][1])


def test_processes_that_share_a_device_are_added():
    config = replace(
        with_settings(run_config(), micro=1),
        parallelism=ParallelismConfig(pipeline_parallel_degree=4, pipeline_parallel_microbatch_size=1),
    )
    each = [use.total for use in memory_of_processes(config, MODEL, HERE)]
    both = replace(fit(GB), ranks=(1, 3), starting=2)
    assert both.memory(config).total == each[1] + each[3] + 2 * PROCESS_NBYTES


def test_a_card_loses_memory_to_fragmentation_and_each_further_process_to_its_context():
    card = MemoryBudget(place="card", free_nbytes=10 * GB, host_free_nbytes=32 * GB)
    assert card.usable_nbytes == int(10 * GB * (1 - FRAGMENTATION_SHARE))
    assert card.process_nbytes == CONTEXT_NBYTES
    assert card.offered_nbytes() == 9 * GB
    assert card.offered_host_nbytes == pytest.approx(0.8 * 32 * GB)
    measured = replace(card, calibration=Calibration(overhead_nbytes=7, fragmentation_share=0.5, activation_factor=2.0))
    assert (measured.usable_nbytes, measured.process_nbytes) == (5 * GB, 7)
    config = with_settings(run_config(), micro=1)
    doubled, plain = (replace(fit(GB), budget=budget).memory(config) for budget in (measured, card))
    assert (doubled.activations, doubled.weights) == (2 * plain.activations, plain.weights)


def test_auto_counts_as_the_larger_of_the_recipes_that_it_may_choose():
    for batch in (1, 8):
        costs = {
            name: segment_costs(MODEL, run_config(precision=name, global_batch_size=batch))
            for name in ("auto", "fp32", "bf16-mixed")
        }
        for auto, wide, mixed in zip(*costs.values(), strict=True):
            assert auto.activation_nbytes == max(wide.activation_nbytes, mixed.activation_nbytes)
            assert auto.state_nbytes == wide.state_nbytes == mixed.state_nbytes
            for in_flight in (1, 4):
                auto_nbytes, *others = (memory_nbytes(cost, run_config(), in_flight) for cost in (auto, wide, mixed))
                assert max(others) <= auto_nbytes < 1.03 * max(others)


def test_offload_is_proposed_where_the_host_has_room_for_it_and_not_on_a_cpu():
    config = with_settings(run_config(), micro=1, checkpointed="segment")
    card = MemoryBudget(place="card", free_nbytes=int(2.2 * GB), host_free_nbytes=32 * GB)
    on_card = replace(fit(GB), budget=card)
    [step] = ways_to_fit(config, on_card.judge)
    assert step.saving.setting == 'training.offload = "optimizer"'
    before, after = on_card.memory(config), on_card.memory(step.config)
    assert before.total - after.total == pytest.approx(before.optimiser, rel=0.1)
    assert after.host == before.optimiser + PROCESS_NBYTES
    poor = replace(on_card, budget=replace(card, host_free_nbytes=GB))
    assert poor.judge(step.config).fits is False
    assert "of host memory for offloaded optimiser state" in poor.describe_need(step.config)
    on_host = replace(fit(int(2.2 * GB)))
    assert not any("offload" in step.saving.setting for step in ways_to_fit(config, on_host.judge))
