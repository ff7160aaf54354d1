"""A member that says that the run is over, or has diverged: the hub believes the sums that it has made itself."""

from tests.programs import events_of
from tests.swarm.hostile.adversary import Adversary
from tests.swarm.hostile.test_accusations import PATIENT
from thinpipe.core.events import Step, Stopped

CLAIMS = ("not_finite", "finished", "signal")
LIE = Step(step=7, loss=2.41, grad_norm=1.0, lr=1e-3, tokens=1, seconds=1, tokens_per_second=1)


def test_no_word_of_one_ends_the_run(run_config, start_hub, join, tmp_path):
    hub, invites = start_hub(2, *PATIENT)
    anna = join(invites[0], "anna")
    with Adversary(invites[1], tmp_path) as mallory:
        for claim in CLAIMS:
            names = mallory.until_assigned(flops=1e6).names
            assert names[0] == "mallory", "the first peer reports events"
            mallory.report_event(Stopped(step=7, reason=claim))
            mallory.report_event(
                Step(step=7, loss=2.41, grad_norm=1.0, lr=1e-3, tokens=1, seconds=1, tokens_per_second=1)
            )
            mallory.say("next", mallory.request(stop_reason=claim))
            hub.until(f'mallory says that training stopped \\("{claim}"\\), which no sum of the steps shows')
        hub.until("mallory reports step 7, which was not computed")
        hub.until("mallory is suspended for 5 min")
        hub.until(r"step: +10 ")
    assert anna.process.poll() is None
    assert hub.process.poll() is None
    assert "lower optimizer.lr" not in hub.printed
    assert events_of(run_config, Stopped) == []
    assert 2.41 not in [step.loss for step in events_of(run_config, Step)]
