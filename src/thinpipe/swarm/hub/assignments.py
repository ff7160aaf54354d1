"""What a generation is expected to do, what the event log says of its start, and the assignment of its peers: from
membership and run, without I/O."""

import math
from collections.abc import Mapping, Sequence

from thinpipe.core.hub_events import GenerationStarted
from thinpipe.swarm.hub.membership import Membership
from thinpipe.swarm.hub.present_peers import PresentPeers
from thinpipe.swarm.hub.replica import Generation
from thinpipe.swarm.hub.run_host import GenerationForecast, GenerationStart
from thinpipe.swarm.protocol.machine_report import MachineReport
from thinpipe.swarm.protocol.messages import Assignment, Measure


def forecast(generation: Generation, present: PresentPeers) -> GenerationForecast:
    """Expected speed of a generation, by the reports of its peers."""
    reports = _reports(generation, present).values()
    return GenerationForecast(
        tokens_per_second=generation.partition.tokens_per_second,
        up_bps=[report.up_bps for report in reports],
        hub_down_bps=present.hub_rates[1],
        down_bps=[report.down_bps for report in reports],
        hub_up_bps=present.hub_rates[0],
        latency_s=max(report.latency_s for report in reports),
    )


def start_event(generation: Generation, present: PresentPeers, step: int, *, who_reads: str) -> GenerationStarted:
    """The event of a generation that continues from this step. `who_reads`: who can read the data, in one sentence."""
    reports, planned = _reports(generation, present), generation.partition.tokens_per_second
    return GenerationStarted(
        generation=generation.number,
        step=step,
        peers=[reports[name].place(name, segments) for name, segments in generation.partition.stages],
        bottleneck=generation.partition.bottleneck,
        who_reads=who_reads,
        planned_tokens_per_second=planned if math.isfinite(planned) else 0.0,
    )


def make_assignment(
    generation: Generation, start: GenerationStart, *, commit_plan: str, diverged_steps: Sequence[int]
) -> Assignment:
    return Assignment(
        generation=generation.number,
        names=generation.names,
        shares=list(generation.shares.values()),
        incarnations=dict(generation.incarnations),
        settings=start.settings,
        manifest=start.manifest,
        dataset_info=start.dataset_info,
        tokenizer=start.tokenizer,
        text=f"slowest part: {generation.partition.bottleneck}; {commit_plan}",
        upload_bytes_per_second=start.upload_bytes_per_second,
        diverged_steps=list(diverged_steps),
    )


def measuring_text(name: str, measure: Measure, membership: Membership) -> str:
    """The line for the hub's owner about the measurement that this peer makes now."""
    if measure.concurrent:
        return "all machines measure their links at the same time, for some seconds"
    present = membership.present
    count = max(len(present), 0 if membership.last_generation else membership.wanted)
    number = 1 + len(present) - len(present.unmeasured)
    return f"measuring the machine and the link of {name}, {number} of {count}, for some seconds"


def _reports(generation: Generation, present: PresentPeers) -> Mapping[str, MachineReport]:
    """Reports of the generation's peers by name, in pipeline order."""
    reports = {name: present[name].report for name in generation.names}
    return {name: report for name, report in reports.items() if report is not None}
