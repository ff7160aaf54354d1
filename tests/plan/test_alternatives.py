"""What a plan says of one machine without the others and of a rented card: true figures, and when friends are not worth
it."""

from dataclasses import replace

import pytest

from tests.plan.test_planner import four, machine, planned, run_config
from thinpipe.config.model import ExecutionConfig
from thinpipe.planning.alternatives import find_alternatives
from thinpipe.planning.devices import DEVICES, RENTED_USD_PER_HOUR
from thinpipe.planning.machines import Machines, load_machines, rented_cards
from thinpipe.planning.planner import estimate_cost

FAST_LINK = {"up_bps": 1e9, "down_bps": 1e9, "latency_s": 0.0}
SLOW_LINK = {"up_bps": 1e5, "down_bps": 1e5, "latency_s": 0.2}


def found(plan, **changes):
    return find_alternatives(replace(plan, **changes), estimate_cost(plan))


def test_behind_slow_links_one_machine_is_faster_and_that_is_said():
    plan = planned(run_config(), four(flops=1e13, **SLOW_LINK))
    others = found(plan)
    [own] = planned(run_config(), Machines(machines=(machine("m0", flops=1e13),))).machine_loads
    assert others.one_machine.machine.name == own.machine.name
    assert others.one_machine.settings == ()
    assert others.one_machine.plan.tokens_per_second > plan.tokens_per_second
    assert others.verdict.startswith("friends are not worth it: m0 without the others is ")


def test_the_fastest_of_those_that_can_hold_it_is_taken_with_the_settings_that_fit():
    config = run_config()
    whole = planned(config, Machines(machines=(machine("m0"),))).machine_loads[0].memory.total
    machines = Machines(
        machines=(
            machine("fast", flops=1e13, memory_nbytes=whole // 20),
            machine("middle", flops=1e12, memory_nbytes=int(0.95 * whole)),
            machine("slow", flops=1e10, memory_nbytes=2 * whole),
            machine("other", flops=1e10, memory_nbytes=2 * whole),
        )
    )
    own = found(planned(config, machines)).one_machine
    assert own.machine.name == "middle"
    assert own.settings
    assert own.plan.fits


def test_friends_are_worth_it_where_no_machine_could_hold_it():
    smallest = run_config(pipeline_parallel_microbatch_size=1)
    smallest = replace(
        smallest,
        training=replace(smallest.training, precision="bf16"),
        execution=ExecutionConfig(checkpoint_activations="segment"),
    )
    needed = max(load.memory.total for load in planned(smallest, four()).machine_loads)
    others = found(planned(smallest, four(memory_nbytes=needed, **FAST_LINK)))
    assert others.one_machine is None
    assert others.verdict == "friends are worth it: no machine could hold it without the others"


def test_a_rented_card_is_the_cheapest_that_holds_it():
    machines = replace(four(price_per_hour=0.01, **FAST_LINK), rented=rented_cards("bf16"))
    plan = planned(run_config(), machines)
    others = found(plan)
    cheapest = min(RENTED_USD_PER_HOUR, key=lambda name: RENTED_USD_PER_HOUR[name] / DEVICES[name].bf16_tflops)
    assert others.rented.machine.name == cheapest
    hours = others.rented.cost.hours
    assert others.rented.cost.money == pytest.approx(hours * RENTED_USD_PER_HOUR[cheapest])
    assert others.verdict == f"friends are not worth it: a rented {cheapest} is faster and costs less"
    free = found(planned(run_config(), replace(machines, machines=four(**FAST_LINK).machines)))
    assert "hours of waiting for 4 machines" in free.verdict


def test_the_price_of_a_card_can_be_given(tmp_path):
    path = tmp_path / "machines.toml"
    path.write_text('[rented]\ndevice = "L4"\nprice = 3\n[[machine]]\nname = "a"\ntflops = 1\nmemory = "1GB"\n')
    machines = load_machines(path)
    assert [(card.name, card.price_per_hour) for card in machines.rented] == [("L4", 3.0)]
    assert not machines.rented_price_assumed


def test_of_one_machine_only_the_rented_card_is_an_alternative():
    machines = Machines(machines=(machine("one"),), rented=rented_cards("bf16"))
    others = found(planned(run_config(), machines))
    assert (others.one_machine, others.verdict) == (None, "")
    assert others.rented is not None
