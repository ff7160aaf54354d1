"""Summary of a run as one paragraph of text."""

from statistics import median

from thinpipe.core.units import format_bytes, format_duration
from thinpipe.report.context import ReportContext, settings_of
from thinpipe.report.summary import Summary, best_validation
from thinpipe.report.traffic import traffic_of

_STOP_REASONS = {
    "finished": "It is finished.",
    "signal": "It was stopped by a signal and can be resumed.",
    "not_finite": "It stopped because the values of three steps in a row were not finite.",
    "not_saved": "It stopped because its last checkpoint could not be saved.",
}


def summary_paragraph(summary: Summary, context: ReportContext) -> str:
    """The paragraph, without the sentences for which the log has no data."""
    return " ".join(
        filter(
            None,
            (
                _training(summary, context),
                _losses(summary),
                _links(summary, context),
                _faults(summary),
                f"Compared with an undisturbed run, its numbers are {words}." if (words := summary.exactness) else "",
                _audit(summary),
                _end(summary),
            ),
        )
    )


def _training(summary: Summary, context: ReportContext) -> str:
    settings, last = settings_of(summary), summary.steps[-1]
    wanted = settings.get("training", {}).get("steps")
    of_all = f" of {wanted:,}" if isinstance(wanted, int) and wanted != last.step else ""
    model = f"a model of {summary.starts[-1].parameters:,} parameters" if summary.starts else "a model"
    return (
        f"The run {context.name} has trained {model} for {last.step:,}{of_all} steps on {last.tokens:,} tokens, in "
        f"{format_duration(summary.seconds)} of computing ({last.tokens / summary.seconds:,.0f} tokens per second)."
    )


def _losses(summary: Summary) -> str:
    validations = summary.validations
    if not validations:
        first, last = summary.steps[0], summary.steps[-1]
        return f"The training loss went from {first.loss:.3f} to {last.loss:.3f} nats per token."
    first_loss, last_event = validations[0].loss or 0.0, validations[-1]
    best, step = best_validation(validations)
    bits = f" ({last_event.bits_per_byte:.3f} bits per byte)" if last_event.bits_per_byte is not None else ""
    begun = f"went from {first_loss:.3f} to" if len(validations) > 1 else "is"
    where = "" if step == last_event.step else f"; it was best at step {step:,}, {best:.3f}"
    return f"The validation loss {begun} {last_event.loss or 0.0:.3f} nats per token{bits}{where}."


def _links(summary: Summary, context: ReportContext) -> str:
    last = summary.steps[-1]
    if not last.links:
        return "It computed in one process, so that nothing crossed a link." if not last.busy else ""
    bubble = median(step.bubble or 0.0 for step in summary.steps)
    text = f"{len(last.busy)} processes computed it and waited for messages {bubble:.0%} of the time"
    if context.dim is None:
        return f"{text}; {summary.nbytes_per_token:,.0f} bytes per token crossed the busiest link."
    traffic = traffic_of(summary.steps, dim=context.dim, tokens_per_step=summary.tokens_per_step)
    return f"{text}; they sent {format_bytes(traffic.sent_nbytes)}, {traffic.description}."


def _faults(summary: Summary) -> str:
    parts = []
    starts = len(summary.starts)
    if starts > 1:
        parts.append(f"was started {starts} times")
    if summary.repeated:
        parts.append(f"computed {len(summary.repeated):,} step(s) again")
    if summary.retried:
        parts.append(f"retried {len(summary.retried):,} step(s)")
    if summary.skipped:
        parts.append(f"skipped {len(summary.skipped):,} step(s)")
    if not parts:
        return "Nothing went wrong."
    return f"It {', '.join(parts[:-1])}{' and ' if len(parts) > 1 else ''}{parts[-1]}."


def _audit(summary: Summary) -> str:
    if not summary.recomputed and not summary.alarms:
        return ""
    agree = sum(not event.is_disputed for event in summary.recomputed)
    text = f"The hub computed {len(summary.recomputed):,} reported loss(es) again, of which {agree:,} agree"
    return f"{text}; ALARM: {len(summary.alarms):,} event(s) show false reports." if summary.alarms else f"{text}."


def _end(summary: Summary) -> str:
    if summary.ended is None:
        return "It is still running, or was killed."
    return _STOP_REASONS.get(summary.ended, f"It ended: {summary.ended}.")
