"""Builds the sections of a report from the summary of a run; `html_page` and `markdown_page` render them."""

from thinpipe.report.comparison import comparison_figure, loss_difference
from thinpipe.report.context import ReportContext, changed_settings, settings_of
from thinpipe.report.document import Code, Collapsible, Facts, Picture, Report, Section, Table, Text
from thinpipe.report.faults import faults_section, format_utc
from thinpipe.report.loss_figures import loss_figure, throughput_figure
from thinpipe.report.prose import summary_paragraph
from thinpipe.report.resource_sections import bytes_section, time_section
from thinpipe.report.summary import Summary
from thinpipe.report.traffic import traffic_of


def write_report(summary: Summary, context: ReportContext) -> Report:
    first, last = summary.events[0].time_s, summary.events[-1].time_s
    sections = [
        Section("Summary", [Text(summary_paragraph(summary, context)), _facts(summary, context)]),
        *_comparison(summary, context),
        Section("Loss", [Picture("loss", loss_figure(summary), "Loss over the number of training tokens.")]),
        Section("Throughput", [Picture("throughput", throughput_figure(summary), "Tokens per second over time.")]),
        bytes_section(summary, context),
        time_section(summary),
        faults_section(summary),
        *_sample(context),
        _use(context),
        _settings(summary, context),
    ]
    return Report(context.name, f"{format_utc(first)} to {format_utc(last)} UTC", sections)


def _facts(summary: Summary, context: ReportContext) -> Facts:
    last = summary.steps[-1]
    entries = [("steps", f"{last.step:,}"), ("tokens", f"{last.tokens:,}")]
    if summary.validations:
        entries.append(("validation loss", f"{summary.validations[-1].loss:.4f}"))
    entries += [("training loss", f"{last.loss:.4f}"), ("tokens/s, median step", f"{summary.tokens_per_second:,.0f}")]
    if last.links:
        entries.append(("bytes per token, busiest link", f"{summary.nbytes_per_token:,.0f}"))
        if context.dim is not None:
            traffic = traffic_of(summary.steps, dim=context.dim, tokens_per_step=summary.tokens_per_step)
            entries.append(("fewer bytes than dense bf16", f"{traffic.ratio:.1f} x"))
    return Facts(entries)


def _comparison(summary: Summary, context: ReportContext) -> list[Section]:
    if not context.against:
        return []
    rows = []
    for name, other in context.against.items():
        mine, theirs, what = loss_difference(summary, other)
        speed = summary.tokens_per_second / other.tokens_per_second
        change = f"{mine - theirs:+.4f} ({mine / theirs - 1:+.2%})"
        rows.append([name, change, f"{mine:.4f}", f"{theirs:.4f}", f"{speed:.2f} x", what])
    head = ["against", "loss difference", "here", "there", "speed here", "which loss"]
    runs = {context.name: summary, **context.against}
    caption = "Training loss over the seconds of computing, and the speed of the median step."
    return [Section("Compared", [Table(head, rows), Picture("comparison", comparison_figure(runs), caption)])]


def _sample(context: ReportContext) -> list[Section]:
    return [] if context.sample is None else [Section("Sample", [context.sample])]


def _use(context: ReportContext) -> Section:
    run = context.folder.as_posix()
    commands = f'thinpipe generate {run} --prompt "The "\nthinpipe eval {run}\nthinpipe export {run} exported'
    trust = ", trust_remote_code=True" if context.has_projection else ""
    python = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("exported"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("exported"{trust})'
    )
    kind = "a Hugging Face folder with code of its own" if context.has_projection else "an ordinary Hugging Face folder"
    text = f"The export is {kind} and does not need thinpipe:"
    return Section("Use the result", [Code(commands), Text(text), Code(python, "python")])


def _settings(summary: Summary, context: ReportContext) -> Section:
    if not summary.starts:
        return Section("Settings and versions", [Text("The event log has no settings.")])
    started = summary.starts[-1]
    rows = changed_settings(settings_of(summary), context.defaults)
    return Section(
        "Settings and versions",
        [
            Table(["setting", "here", "default"], rows),
            Collapsible("All settings", [Code(started.config.strip(), "toml")]),
            Table(["software", "version"], [[name, version] for name, version in started.versions.items()]),
        ],
    )
