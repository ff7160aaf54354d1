"""Who computed which step: in a hub's run its epochs say so, elsewhere nobody has a name."""

from thinpipe.core.events import Assembled, Step
from thinpipe.report.summary import Summary


def names_by_step(summary: Summary) -> list[list[str]]:
    """Of the processes of each step that counts, in order; empty where the log does not say."""
    names, by_event = list[str](), dict[int, list[str]]()
    for event in summary.events:
        if isinstance(event, Assembled):
            names = [peer.name for peer in event.peers]
        elif isinstance(event, Step):
            by_event[id(event)] = names
    return [by_event.get(id(step), []) for step in summary.steps]
