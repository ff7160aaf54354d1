"""Hooks of the training loop: when the run environment is called."""

import signal

import pytest

from thinpipe.training.run_environment import RunEnvironment
from thinpipe.training.trainer import Trainer
from thinpipe.transport.collectives import collectives_for


class Recording(RunEnvironment):
    """Records steps, announcements and all-reduces; asks for a stop in the third step, by a signal or as a hub."""

    def __init__(self, *, by_signal):
        self.by_signal, self.calls, self.steps = by_signal, [], 0

    def collectives(self, group):
        alone, calls = collectives_for(group), self.calls
        reduce = alone.all_reduce_sum

        def recorded(numbers):
            calls.append("all-reduce")
            return reduce(numbers)

        alone.all_reduce_sum = recorded
        return alone

    def step(self):
        self.steps += 1
        self.calls.append(f"step {self.steps}")
        if self.by_signal and self.steps == 3:
            signal.raise_signal(signal.SIGTERM)
        return super().step()

    def asked_to_stop(self):
        return not self.by_signal and self.steps == 3

    def before_stop_request(self):
        self.calls.append("announcement")


@pytest.mark.parametrize("by_signal", [True, False], ids=["by a signal", "by the hub"])
def test_a_signal_is_announced_before_the_all_reduce_that_tells_the_others(run_config, by_signal):
    environment = Recording(by_signal=by_signal)
    assert Trainer(run_config, run_environment=environment).train() == "signal"
    of_step = environment.calls[environment.calls.index("step 3") :]
    assert of_step[:3] == (["step 3", "announcement", "all-reduce"] if by_signal else ["step 3", "all-reduce"])[:3]
    assert environment.calls.count("announcement") == int(by_signal)
