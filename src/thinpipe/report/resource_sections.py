"""Report sections on resource use: bytes sent between processes, and time and memory of each process."""

from thinpipe.core.units import format_bytes, format_duration
from thinpipe.report.context import ReportContext
from thinpipe.report.document import Block, Collapsible, Picture, Section, Table, Text
from thinpipe.report.summary import Summary
from thinpipe.report.time_spent import peers_by_step, time_figure, time_spent
from thinpipe.report.traffic import traffic_of


def bytes_section(summary: Summary, context: ReportContext) -> Section:
    last = summary.steps[-1]
    if not last.links:
        text = "All segments were in one process: nothing was sent."
        width, dim = context.state_width, context.dim
        if width is not None and dim is not None and width < dim:
            text += (
                f" In several, {width} numbers per token instead of {dim} would cross each boundary in each direction."
            )
        return Section("Bytes", [Text(text)])
    sent = traffic_of(summary.steps, dim=context.dim or 0, tokens_per_step=summary.tokens_per_step)
    blocks: list[Block | Collapsible] = []
    if context.dim is not None:
        blocks.append(
            Text(
                f"The processes sent {format_bytes(sent.sent_nbytes)}, {sent.description}: states and gradients of "
                f"all {context.dim} numbers per token in bfloat16 are {format_bytes(sent.dense_nbytes)}. Earlier "
                "attempts of repeated steps are not counted."
            )
        )
    tokens = summary.tokens_per_step
    rows = [
        [
            f"{link.boundary}, {'states forward' if link.forward else 'gradients back'}",
            f"{link.nbytes / tokens:,.1f}",
            f"{2 * context.dim:,}" if context.dim is not None else "unknown",
            f"{link.mbps:.2f}",
        ]
        for link in last.links
    ]
    blocks.append(Table(["boundary", "bytes per token", "dense bf16", "Mbps in the last step"], rows))
    return Section("Bytes", blocks)


def time_section(summary: Summary) -> Section:
    spent = time_spent(summary.steps, peers_by_step(summary))
    overhead_s = summary.overhead_seconds
    memory = dict(zip(peers_by_step(summary)[-1] or list(spent), summary.steps[-1].memory, strict=False))
    rows = []
    for name, each in spent.items():
        shares = [f"{part / each.total:.0%}" for part in (each.computing, each.waiting, each.rest)]
        rows.append(
            [name, format_duration(each.total), *shares, format_bytes(memory[name]) if name in memory else "unknown"]
        )
    caption = f"Time of each process in the steps, and {format_duration(overhead_s)} of validation and checkpoints."
    head = ["process", "in steps", "computing", "waiting", "rest", "peak memory"]
    return Section("Where the time went", [Picture("time", time_figure(spent, overhead_s), caption), Table(head, rows)])
