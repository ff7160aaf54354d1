"""Plans as a whole: who has what, what it needs, what limits it. The pieces have tests of their own."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.fake_tensor_oracle import segment_needs, shared_nbytes
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import ModelSettings, ParallelismConfig, RunConfig, TrainingConfig
from thinpipe.config.toml import load_toml
from thinpipe.core.errors import UserError
from thinpipe.planning.advice import advise, bottleneck
from thinpipe.planning.machines import Hub, Machine, Machines
from thinpipe.planning.model_shape import resolve_model
from thinpipe.planning.planner import estimate_cost, make_plan
from thinpipe.planning.search import balanced_cut, search

GB = 10**9


def run_config(**parallelism) -> RunConfig:
    return RunConfig(
        model=ModelSettings(preset="llama-10m", boundaries=(2, 4, 6), subspace=SubspaceConfig(width=16)),
        training=TrainingConfig(steps=100, global_batch_size=16, seq_len=128, precision="fp32"),
        parallelism=ParallelismConfig(**{"pipeline_parallel_microbatch_size": 2, **parallelism}),
        boundary=BoundaryConfig(forward="bf16", backward="int8"),
    )


def machine(name: str, **changes) -> Machine:
    fields = {"flops": 1e11, "memory_nbytes": 4 * GB, "up_bps": 20e6, "down_bps": 100e6, "latency_s": 0.02}
    return Machine(name=name, **{**fields, **changes})


def four(**changes) -> Machines:
    return Machines(machines=tuple(machine(f"m{index}", **changes) for index in range(4)))


def planned(config: RunConfig, machines: Machines, **options):
    model, _ = resolve_model(config, 4096)
    return make_plan(config, model, machines, **options)


def test_every_machine_has_its_segments_and_their_weights():
    plan = planned(run_config(), four())
    assert [machine_load.segments for machine_load in plan.machine_loads] == [(0,), (1,), (2,), (3,)]
    model, _ = resolve_model(run_config(), 4096)
    needs = segment_needs(model, run_config())
    shared = shared_nbytes(model, run_config())
    for machine_load, need in zip(plan.machine_loads, needs, strict=True):
        assert machine_load.memory.total == pytest.approx(need.memory_nbytes + shared, rel=0.02)


def test_a_machine_without_room_is_named_with_what_it_lacks():
    plan = planned(run_config(), four(memory_nbytes=10**6))
    assert not plan.fits
    description = [change.description for change in advise(plan)]
    assert description[0].startswith("m0 lacks ")
    assert any("checkpoint_activations" in line for line in description)
    assert description[-1] == "more machines, or machines with more memory"


def test_advice_to_make_a_plan_fit_makes_it_fit():
    enough = max(
        load.memory.total for load in planned(run_config(pipeline_parallel_microbatch_size=1), four()).machine_loads
    )
    plan = planned(run_config(), four(memory_nbytes=enough))
    *_, last = (change.description for change in advise(plan))
    assert last.startswith("set parallelism.pipeline_parallel_microbatch_size = 1 (")
    assert last.endswith("which fits")
    assert planned(run_config(pipeline_parallel_microbatch_size=1), four(memory_nbytes=enough)).fits
    assert not planned(run_config(pipeline_parallel_microbatch_size=1), four(memory_nbytes=enough - 1)).fits


def test_a_slow_link_is_the_bottleneck_and_a_faster_one_is_advised():
    config = replace(run_config(), boundary=BoundaryConfig())
    slow = four(flops=1e13, up_bps=1e6, down_bps=1e6, latency_s=0.0)
    plan = planned(config, slow)
    assert "the link of m" in bottleneck(plan)
    assert any(change.description == "links twice as fast for m1, m2" for change in advise(plan))


def test_a_slow_processor_is_what_limits_and_the_advice_is_really_faster():
    machines = four(up_bps=1e9, down_bps=1e9, latency_s=0.0)
    machines = replace(machines, machines=(machine("old", flops=1e10), *machines.machines[1:]))
    plan = planned(run_config(), machines)
    assert "the processor of old" in bottleneck(plan)
    best = advise(plan)[0]
    assert best.description == "machines twice as fast for old"
    faster = replace(machines, machines=(machine("old", flops=2e10), *machines.machines[1:]))
    assert planned(run_config(), faster).tokens_per_second / plan.tokens_per_second == pytest.approx(best.speedup)


def test_with_latency_more_microbatches_under_way_are_advised_for_1f1b():
    plan = planned(run_config(), four(flops=1e12, latency_s=0.2, up_bps=1e9, down_bps=1e9))
    assert any("extra_microbatches" in change.description for change in advise(plan))


def test_a_hub_carries_every_boundary_and_its_rule_places_segments():
    machines = replace(four(), hub=Hub(up_bps=50e6, down_bps=50e6, latency_s=0.0))
    plan = planned(run_config(), machines, use_all_peers=True)
    assert len(plan.machine_loads) == 4
    through_hub = plan.timeline.link_nbytes["hub up"]
    boundary_nbytes = 3 * 8 * (plan.messages.forward_nbytes + plan.messages.backward_nbytes)
    assert through_hub >= boundary_nbytes
    assert through_hub == pytest.approx(boundary_nbytes, rel=0.1)  # headers, and the exchange


def test_hubs_leave_out_who_would_slow_everybody_down():
    fast = tuple(machine(f"fast{index}", flops=1e13) for index in range(2))
    machines = Machines(machines=(*fast, machine("slow", flops=1e8)), hub=Hub(up_bps=1e9, down_bps=1e9, latency_s=0.0))
    assert "slow" in planned(run_config(), machines).standbys


def test_search_finds_something_that_is_at_least_as_fast_and_fits():
    config, machines = run_config(), four(flops=1e12, latency_s=0.1)
    model, _ = resolve_model(config, 4096)
    before = make_plan(config, model, machines)
    found = search(config, model, machines)
    assert found.best.fits
    assert found.best.tokens_per_second >= before.tokens_per_second
    assert found.tried > 20


def test_a_balanced_cut_gives_faster_machines_more_blocks():
    config = run_config()
    model, _ = resolve_model(config, 4096)
    cuts = balanced_cut(config, model, (machine("a", flops=3e12), machine("b", flops=1e12)))
    assert len(cuts) == 1
    assert cuts[0] > 4


def test_search_says_when_nothing_fits():
    config = run_config()
    model, _ = resolve_model(config, 4096)
    with pytest.raises(UserError, match="add a machine"):
        search(config, model, four(memory_nbytes=1000))


def test_cost_is_hours_times_prices():
    plan = planned(run_config(), four(price_per_hour=0.5))
    cost = estimate_cost(plan, 3600 * 1000)
    assert cost.hours == pytest.approx(1000 / plan.tokens_per_second)
    assert cost.money == pytest.approx(2.0 * cost.hours)
    assert estimate_cost(planned(run_config(), four())).money is None


def test_one_machine_has_no_link_traffic_and_no_bubble():
    machines = Machines(machines=(machine("alone"),))
    plan = planned(run_config(), machines)
    assert plan.timeline.bubble == pytest.approx(0.0, abs=1e-9)
    assert not sum(plan.timeline.link_nbytes.values())


@pytest.mark.parametrize("name", ["friends.toml", "links.toml", "quickstart.toml"])
def test_examples_can_be_planned_for_the_example_machines(name):
    from thinpipe.planning.machines import load_machines

    examples = Path(__file__).parents[2] / "examples"
    config = load_toml(examples / name, RunConfig)
    plan = planned(config, load_machines(examples / "machines.toml"))
    assert plan.fits
    assert plan.tokens_per_second > 0


def test_of_machines_with_similar_names_the_right_one_is_advised():
    names = [f"g-{number}" for number in range(1, 13)]
    config = replace(run_config(), training=replace(run_config().training, global_batch_size=32))
    config = replace(config, model=replace(config.model, n_layers=12, boundaries=tuple(range(1, 12))))
    fields = {"up_bps": 1e9, "down_bps": 1e9, "latency_s": 0.0}
    machines = tuple(machine(name, flops=1e9 if name == "g-12" else 1e12, **fields) for name in names)
    plan = planned(config, Machines(machines=machines))
    assert "the processor of g-12" in bottleneck(plan)
    assert any(change.description == "machines twice as fast for g-12" for change in advise(plan))


def test_a_line_without_a_limit_in_one_direction_is_made_faster_in_the_other():
    config = replace(run_config(), boundary=BoundaryConfig())
    plan = planned(config, four(flops=1e13, up_bps=float("inf"), down_bps=1e6, latency_s=0.0))
    (change,) = (change for change in advise(plan) if "links twice as fast" in change.description)
    assert change.speedup > 1.2


def test_latency_through_a_hub_is_that_of_both_ends_and_twice_the_hubs():
    config = run_config(pipeline_parallel_schedule="GPipe", pipeline_parallel_microbatch_size=16)
    fast = {"flops": 1e15, "up_bps": 1e12, "down_bps": 1e12}
    near = planned(config, replace(four(**fast, latency_s=0.0), hub=Hub()), use_all_peers=True).timeline.seconds
    for latency, of_hub in ((0.5, 0.0), (0.0, 0.5), (0.5, 0.5)):
        machines = replace(four(**fast, latency_s=latency), hub=Hub(latency_s=of_hub))
        seconds = planned(config, machines, use_all_peers=True).timeline.seconds
        trips = 2 * 3 + 1  # there and back over three boundaries; the exchange goes to the hub and back
        assert seconds - near == pytest.approx(trips * 2 * (latency + of_hub), rel=1e-3)


def test_a_hub_that_would_refuse_is_a_plan_that_does_not_fit():
    """Its rule counts as many micro-batches under way as there are segments."""
    config = run_config()
    model, _ = resolve_model(config, 4096)
    most = max(need.memory_nbytes for need in segment_needs(model, config)) + shared_nbytes(model, config)
    tight = replace(four(memory_nbytes=most - 1), hub=Hub())
    plan = planned(config, tight, use_all_peers=True)
    assert not plan.fits
    assert "the hub would say: segment" in advise(plan)[0].description
    assert planned(config, replace(four(memory_nbytes=most), hub=Hub()), use_all_peers=True).fits


def test_with_fewer_microbatches_than_machines_a_hub_takes_fewer_machines():
    config = run_config(pipeline_parallel_microbatch_size=8)
    plan = planned(config, replace(four(up_bps=1e12, down_bps=1e12), hub=Hub()), use_all_peers=True)
    assert len(plan.machine_loads) == 2


def test_a_search_for_a_hub_finds_what_a_hub_accepts():
    config = replace(run_config(), model=replace(run_config().model, boundaries=tuple(range(1, 8))))
    model, _ = resolve_model(config, 4096)
    machines = Machines(machines=four(latency_s=0.0).machines[:2], hub=Hub())
    assert search(config, model, machines).best.config.parallelism.pipeline_parallel_schedule in ("GPipe", "1F1B")
    with pytest.raises(UserError, match="two places"):
        planned(run_config(pipeline_parallel_schedule="Interleaved1F1B"), machines)
    with pytest.raises(UserError, match="a hub gives out segments by itself"):
        planned(run_config(pipeline_parallel_shares=(1, 3)), machines)


def test_without_a_hub_it_is_said_with_how_many_processes_the_run_is_started():
    (said,) = planned(run_config(), four()).assumptions
    assert said == "the run is started with --parallelism.pipeline-parallel-degree 4"
    assert not planned(run_config(pipeline_parallel_degree=4), four()).assumptions


def test_offloaded_state_is_in_host_memory_and_takes_the_time_of_its_copies():
    config = run_config()
    offloaded = replace(config, training=replace(config.training, offload="optimizer"))
    machines = four(copy_bytes_per_second=1e8, host_memory_nbytes=8 * GB)
    before, after = planned(config, machines), planned(offloaded, machines)
    state = [load.memory.optimiser for load in before.machine_loads]
    assert [load.memory.optimiser for load in after.machine_loads] == [0, 0, 0, 0]
    assert [load.memory.host - 400_000_000 for load in after.machine_loads] == state
    assert after.timeline.seconds - before.timeline.seconds == pytest.approx(2 * max(state) / 1e8, rel=0.05)
    assert "copies between cards and their hosts at 0.1 GB/s" in after.assumptions
    assert planned(offloaded, four()).assumptions[-1] == "enough host memory at m0, m1, m2, m3 (host_memory)"
    mixed = replace(offloaded, training=replace(offloaded.training, precision="bf16-mixed"))
    load = planned(mixed, machines).machine_loads[1]
    assert 2 * load.parameters < load.memory.weights < 4 * load.parameters  # coordinates have no masters
    [load, *_] = planned(offloaded, four(host_memory_nbytes=None)).machine_loads
    assert (load.memory.optimiser, load.memory.host) == (state[0], 0)


def test_a_host_without_room_for_offloaded_state_is_named_and_a_hub_gives_it_less():
    config = run_config()
    offloaded = replace(config, training=replace(config.training, offload="optimizer"))
    plan = planned(offloaded, four(host_memory_nbytes=401_000_000))
    assert not plan.fits
    assert advise(plan)[0].description.startswith("m0 lacks ")
    assert "of host memory" in advise(plan)[0].description
    state = [load.memory.host - 400_000_000 for load in planned(offloaded, four()).machine_loads]
    small = replace(four(host_memory_nbytes=state[2]), hub=Hub())
    machines = replace(small, machines=(machine("roomy"), *small.machines[1:]))
    hub = planned(offloaded, machines, use_all_peers=True)
    by_name = {load.machine.name: load.segments for load in hub.machine_loads}
    assert len(by_name["roomy"]) >= 1
    assert all(len(segments) == 1 for name, segments in by_name.items() if name != "roomy")
