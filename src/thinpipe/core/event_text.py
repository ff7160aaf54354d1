"""Formats events of a run as lines of text, for the console, the dashboard and reports."""

from collections.abc import Sequence

from thinpipe.core.audit_events import BoundaryAlarm, CommitMeasured, LayersUnchanged, LossRecomputed
from thinpipe.core.events import (
    AnyEvent,
    BasisChanged,
    Merged,
    Retried,
    Saved,
    SaveFailed,
    Skipped,
    Started,
    Step,
    Stopped,
    Validated,
)
from thinpipe.core.hub_events import (
    CheckpointAbandoned,
    CheckpointDamaged,
    CheckpointRepaired,
    CommitsOverdue,
    CommitsResumed,
    ExactnessLost,
    FilesRefused,
    GenerationEnded,
    GenerationStarted,
    PeerJoined,
    PeerLeft,
    PeerResumed,
    PeerSuspended,
    RolledBack,
)
from thinpipe.core.units import format_bytes, format_duration_ceil

_STOP_TEXTS = {
    "finished": "finished",
    "signal": "stopped and saved, because it was asked to (Ctrl+C or SIGTERM): the same command goes on from here",
    "not_finite": "stopped after three skipped steps in a row. Resuming from the last checkpoint computes the same "
    "steps again: lower optimizer.lr or training.max_norm, then run the same command",
    "not_saved": "stopped, and the last checkpoint could not be saved: free disk space and run the same command",
}
"""Line of each stop reason; any other reason is shown as it is."""


def format_event_line(event: AnyEvent, names: Sequence[str] = ()) -> str:
    """One line of text, prefixed with the step. `names`: as `format_event`."""
    text = format_event(event, names)
    return text if isinstance(event, Started) else f"step: {event.step:>6}  {text}"


def format_event(event: AnyEvent, names: Sequence[str] = ()) -> str:
    """One line of text, without the step. `names`: of the peers in pipeline order, in a hub's run."""
    match event:
        case Started():
            origin = f"resumed from {event.resumed_from}" if event.resumed_from else "new run"
            changes = f"; changed: {', '.join(event.changed)}" if event.changed else ""
            precision = "".join(f", precision {each}" for each in dict.fromkeys(event.precisions))
            return f"{origin}, {event.parameters:,} trainable parameters{precision}{changes}"
        case Step():
            return (
                f"loss: {event.loss:7.4f}  grad_norm: {event.grad_norm:7.4f}  "
                f"lr: {event.lr:.2e}  tps: {event.tokens_per_second:,.0f}{_links(event, names)}"
            )
        case Retried():
            return f"retried: {event.culprit} {event.reason}, from {event.sender}; no weight changed"
        case Skipped():
            sender = f", from {event.sender}" if event.sender else ""
            return f"skipped: {event.culprit} {event.reason}{sender}; no weight changed"
        case Validated():
            if event.loss is None:
                return "validation loss is not finite"
            bits = f"  bits per byte: {event.bits_per_byte:.4f}" if event.bits_per_byte is not None else ""
            each = ", ".join(f"{source.name} {_number(source.loss)}" for source in event.sources)
            return f"validation loss: {event.loss:7.4f}{bits}{f'  ({each})' if each else ''}"
        case Merged():
            counts = ", ".join(map(str, event.steps))
            of_each = f"{len(event.steps)} replicas took {counts} steps" if len(event.steps) > 1 else f"{counts} steps"
            return f"round {event.round} merged: {of_each}, {format_bytes(event.nbytes)}, {event.seconds:.1f} s"
        case BasisChanged():
            before, after = _number(event.loss_before), _number(event.loss_after)
            loss = f"loss {before} -> {after}" if before != after else f"loss unchanged at {after}"
            return f"subspace moved by at most {event.largest_angle:.3f} rad, {loss}"
        case Saved():
            return f"saved {event.path} ({event.nbytes / 1e6:.1f} MB, {event.seconds:.1f} s)"
        case SaveFailed():
            return f"could not save: {event.reason}; older checkpoints are kept"
        case Stopped():
            return _STOP_TEXTS.get(event.reason, f"stopped: {event.reason}")
        case GenerationStarted():
            places = ", ".join(f"{peer.name} ({_span(peer.segments)})" for peer in event.peers)
            slowest = f"; slowest part: {event.bottleneck}" if event.bottleneck else ""
            return f"generation {event.generation} starts from step {event.step}: {places}{slowest}"
        case GenerationEnded():
            if event.interrupts:
                return f"{event.reason}: regrouping from step {event.step}"
            return f"generation {event.generation} ended: {event.reason}"
        case PeerJoined():
            return f"{event.peer} joined"
        case PeerLeft():
            return event.reason
        case PeerSuspended():
            doubt = f" {event.by} or {event.peer} is at fault:" if event.by else ""
            return (
                f"{event.peer} is suspended for {format_duration_ceil(event.seconds)}: {event.reason}.{doubt} "
                "`thinpipe kick` removes a peer for good"
            )
        case PeerResumed():
            return f"{event.peer} is no longer suspended: {event.reason}"
        case CheckpointDamaged():
            return f"{event.reason}: asking all connected peers for copies"
        case CheckpointRepaired():
            return f"the hub has all files of step {event.step} again"
        case RolledBack():
            return (
                f"{event.reason}: going back from step {event.lost_step} to step {event.step}; the remaining files of "
                f"step {event.lost_step} are in {event.folder}"
            )
        case FilesRefused():
            return f"{event.reason}. If this goes on, `thinpipe kick` removes {event.peer}"
        case CheckpointAbandoned():
            return f"gave up a checkpoint: {event.reason}, although it announced them. Newer ones go on without it"
        case CommitsOverdue():
            return (
                f"ALARM: no commit for {format_duration_ceil(event.seconds)} of training, since step {event.step}: "
                f"{event.reason}. All work since then is lost if the run ends now"
            )
        case CommitsResumed():
            return f"commits come again: step {event.step} is committed"
        case ExactnessLost():
            return f"no longer bit for bit what an undisturbed run computes: {event.reason}"
        case LossRecomputed():
            if not event.is_disputed:
                return f"loss {event.reported:.4f}, computed again by the hub: {event.recomputed:.4f}"
            return (
                f"ALARM: loss {event.reported:.4f} was reported, and the hub computes {event.recomputed:.4f} from its "
                f"commit. Either {' or '.join(event.peers)} reports false losses, or the commit is not what was "
                "trained. Stop the run, remove who is to blame (`thinpipe kick`), and go back to an older checkpoint"
            )
        case CommitMeasured():
            reported = "" if event.reported is None else f", mean of the steps before: {event.reported:.4f} reported"
            found = f"the hub's own batch has loss {event.loss:.4f} with this commit{reported}"
            if not event.is_disputed:
                return found
            return (
                f"ALARM: {found}. Batches of text explain no such difference. Either {' or '.join(event.peers)} "
                "reports false losses, or a peer spoils the weights. Stop the run, remove who is to blame "
                "(`thinpipe kick`), and go back to an older checkpoint"
            )
        case LayersUnchanged():
            return (
                f"ALARM: {', '.join(event.layers)} hardly changed between the commits of steps {event.since} and "
                f"{event.step}, while other layers did: {' and '.join(event.peers)} did not train what they hold"
            )
        case BoundaryAlarm():
            what = f"{'states' if event.forward else 'gradients'} over boundary {event.boundary}"
            distance = f"{event.figure:.3g} against {event.usual:.3g} before, limit {event.limit:.2g}"
            if len(event.peers) > 1:
                pair = " and ".join(event.peers)
                return f"ALARM: {what}: {event.kind} ({distance}): either of {pair} computes or tells what is not so"
            return f"ALARM: {what}: their {event.kind} changed suddenly ({distance}): sent by {', '.join(event.peers)}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _span(segments: Sequence[int]) -> str:
    first, last = segments[0], segments[-1]
    return f"segment {first}" if first == last else f"segments {first} to {last}"


def _links(event: Step, names: Sequence[str]) -> str:
    """Pipeline statistics of a step: bubble, slowest process or peer, bytes sent and the busiest link."""
    if event.bubble is None or not event.links:
        return ""
    busiest = max(event.links, key=lambda link: link.mbps)
    total, slowest = sum(link.nbytes for link in event.links), event.slowest
    named = f"process {slowest}" if slowest is None or slowest >= len(names) else names[slowest]
    return (
        f"  bubble: {event.bubble:.0%} (slowest: {named})  "
        f"sent: {total / 1e6:.2f} MB  busiest link: {busiest.mbps:.1f} Mbps over boundary {busiest.boundary} "
        f"{'forward' if busiest.forward else 'back'}, waited {busiest.waited_s:.2f} s"
    )
