"""The sections of a report on what a run used: bytes between its processes, and the time of each."""

from thinpipe.core.units import format_bytes
from thinpipe.report.background import Background
from thinpipe.report.bars import time_figure
from thinpipe.report.document import Block, Folded, Picture, Section, Table, Text
from thinpipe.report.peers import names_by_step
from thinpipe.report.summary import Summary
from thinpipe.report.time_spent import time_spent
from thinpipe.report.traffic import traffic_of
from thinpipe.report.words import say_time


def bytes_section(summary: Summary, background: Background) -> Section:
    last = summary.steps[-1]
    if not last.links:
        text = "All segments were in one process: nothing was sent."
        width, dim = background.state_width, background.dim
        if width is not None and dim is not None and width < dim:
            text += f" In several, {width} numbers of a token would cross each boundary each way, instead of {dim}."
        return Section("Bytes", [Text(text)])
    sent = traffic_of(summary.steps, dim=background.dim or 0, tokens_per_step=summary.tokens_per_step)
    blocks: list[Block | Folded] = []
    if background.dim is not None:
        blocks.append(
            Text(
                f"{format_bytes(sent.sent_nbytes)} crossed between processes in the steps that count. All "
                f"{background.dim} numbers of a token in bfloat16, states forward and gradients back, would have been "
                f"{format_bytes(sent.dense_nbytes)}: they sent {sent.in_words}."
            )
        )
    tokens = summary.tokens_per_step
    rows = [
        [
            f"{link.boundary}, {'states forward' if link.forward else 'gradients back'}",
            f"{link.nbytes / tokens:,.1f}",
            f"{2 * background.dim:,}" if background.dim is not None else "unknown",
            f"{link.mbps:.2f}",
        ]
        for link in last.links
    ]
    blocks.append(Table(["boundary", "bytes a token", "dense bf16", "Mbps in the last step"], rows))
    return Section("Bytes", blocks)


def time_section(summary: Summary) -> Section:
    spent = time_spent(summary.steps, names_by_step(summary))
    beside = summary.beside_seconds
    memory = dict(zip(names_by_step(summary)[-1] or list(spent), summary.steps[-1].memory, strict=False))
    rows = []
    for name, each in spent.items():
        shares = [f"{part / each.total:.0%}" for part in (each.computing, each.waiting, each.rest)]
        rows.append([name, say_time(each.total), *shares, format_bytes(memory[name]) if name in memory else "unknown"])
    caption = f"Each process in the steps that count, and {say_time(beside)} of validating and saving beside them."
    head = ["process", "in steps", "computing", "waiting", "rest", "most memory"]
    return Section("Where the time went", [Picture("time", time_figure(spent, beside), caption), Table(head, rows)])
