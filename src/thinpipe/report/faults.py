"""Report section on faults and recoveries: restarts, retried and skipped steps, peers that joined and left."""

import re
from datetime import UTC, datetime

from thinpipe.core.event_text import format_event_line
from thinpipe.core.events import Retried, SaveFailed, Skipped, Started, Stopped
from thinpipe.core.hub_events import GenerationStarted, HubEvent, PeerJoined, PeerLeft
from thinpipe.core.units import format_duration
from thinpipe.report.document import Block, Collapsible, Facts, Section, Table, Text
from thinpipe.report.summary import Summary

_MAX_ROWS = 200
"""Maximum number of events listed; a log of months may hold thousands."""
_STEP = re.compile(r"^step:\s+\d+\s+")
_SHOWN_EVENTS = Started | Stopped | Retried | Skipped | SaveFailed | HubEvent


def faults_section(summary: Summary) -> Section:
    lost = sum(step.seconds for step in summary.repeated)
    counts = [("starts", len(summary.starts)), ("steps retried", len(summary.retried))]
    counts += [("steps skipped", len(summary.skipped)), ("steps computed again", len(summary.repeated))]
    generations = [event for event in summary.events if isinstance(event, GenerationStarted)]
    if generations:
        for what, kind in (("peers joined", PeerJoined), ("peers left", PeerLeft)):
            counts.append((what, sum(isinstance(event, kind) for event in summary.events)))
        counts.append(("generations", len(generations)))
    if summary.recomputed or summary.alarms:
        counts += [("losses recomputed by the hub", len(summary.recomputed)), ("alarms", len(summary.alarms))]
    blocks: list[Block | Collapsible] = [Facts([(what, f"{count:,}") for what, count in counts])]
    if lost:
        blocks.append(Text(f"Computing steps again cost {format_duration(lost)}."))
    if summary.unknown:
        blocks.append(
            Text(f"{summary.unknown:,} line(s) of the log were written by another version of thinpipe: left out.")
        )
    shown_events = [event for event in summary.events if isinstance(event, _SHOWN_EVENTS)]
    rows = [
        [format_utc(event.time_s), f"{event.step:,}", _STEP.sub("", format_event_line(event))]
        for event in shown_events[-_MAX_ROWS:]
    ]
    title = "All events" if len(shown_events) <= _MAX_ROWS else f"The last {_MAX_ROWS} of {len(shown_events):,} events"
    return Section("Faults and recoveries", [*blocks, Collapsible(title, [Table(["UTC", "step", "what"], rows)])])


def format_utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
