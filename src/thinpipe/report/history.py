"""The section of a report on what went wrong in a run, who came and went, and what it cost."""

import re
from datetime import UTC, datetime

from thinpipe.core.event_words import describe
from thinpipe.core.events import Arrived, Assembled, Departed, Retried, SaveFailed, Skipped, Started, Stopped
from thinpipe.report.document import Block, Facts, Folded, Section, Table, Text
from thinpipe.report.summary import Summary
from thinpipe.report.words import say_time

_MOST_ROWS = 200
"""Of what happened: a log of months may hold thousands."""
_STEP = re.compile(r"^step:\s+\d+\s+")
_TOLD = (Started, Stopped, Retried, Skipped, SaveFailed, Assembled, Arrived, Departed)


def history_section(summary: Summary) -> Section:
    lost = sum(step.seconds for step in summary.repeated)
    counts = [("starts", len(summary.starts)), ("steps retried", len(summary.retried))]
    counts += [("steps skipped", len(summary.skipped)), ("steps computed again", len(summary.repeated))]
    epochs = [event for event in summary.events if isinstance(event, Assembled)]
    if epochs:
        for what, kind in (("arrivals", Arrived), ("departures", Departed)):
            counts.append((what, sum(isinstance(event, kind) for event in summary.events)))
        counts.append(("epochs", len(epochs)))
    blocks: list[Block | Folded] = [Facts([(what, f"{count:,}") for what, count in counts])]
    if lost:
        blocks.append(Text(f"Computing steps again cost {say_time(lost)}."))
    if summary.unknown:
        blocks.append(Text(f"{summary.unknown:,} line(s) of the log are of another version and were passed over."))
    told = [event for event in summary.events if isinstance(event, _TOLD)]
    rows = [[moment(event.time_s), f"{event.step:,}", _STEP.sub("", describe(event))] for event in told[-_MOST_ROWS:]]
    title = "All that happened" if len(told) <= _MOST_ROWS else f"The last {_MOST_ROWS} of {len(told):,} events"
    return Section("Faults and recoveries", [*blocks, Folded(title, [Table(["UTC", "step", "what"], rows)])])


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
