"""The sections of a report, from the summary of a run. What they look like is for `html_page` and `markdown_page`."""

from thinpipe.report.background import Background, own_settings, settings_of
from thinpipe.report.comparison import comparison_figure, measured_cost
from thinpipe.report.curve import loss_figure, throughput_figure
from thinpipe.report.document import Code, Facts, Folded, Picture, Report, Section, Table, Text
from thinpipe.report.history import history_section, moment
from thinpipe.report.resources import bytes_section, time_section
from thinpipe.report.summary import Summary
from thinpipe.report.traffic import traffic_of
from thinpipe.report.words import paragraph


def write_report(summary: Summary, background: Background) -> Report:
    first, last = summary.events[0].time_s, summary.events[-1].time_s
    sections = [
        Section("Summary", [Text(paragraph(summary, background)), _facts(summary, background)]),
        *_comparison(summary, background),
        Section("Loss", [Picture("loss", loss_figure(summary), "Loss over the tokens that were seen.")]),
        Section("Throughput", [Picture("throughput", throughput_figure(summary), "Tokens per second over time.")]),
        bytes_section(summary, background),
        time_section(summary),
        history_section(summary),
        *_sample(background),
        _use(background),
        _settings(summary, background),
    ]
    return Report(background.name, f"{moment(first)} to {moment(last)} UTC", sections)


def _facts(summary: Summary, background: Background) -> Facts:
    last = summary.steps[-1]
    entries = [("steps", f"{last.step:,}"), ("tokens", f"{last.tokens:,}")]
    if summary.validations:
        entries.append(("validation loss", f"{summary.validations[-1].loss:.4f}"))
    entries += [("training loss", f"{last.loss:.4f}"), ("tokens/s, median step", f"{summary.tokens_per_second:,.0f}")]
    if last.links:
        entries.append(("bytes a token, busiest link", f"{summary.nbytes_per_token:,.0f}"))
        if background.dim is not None:
            traffic = traffic_of(summary.steps, dim=background.dim, tokens_per_step=summary.tokens_per_step)
            entries.append(("fewer bytes than dense bf16", f"{traffic.ratio:.1f} x"))
    return Facts(entries)


def _comparison(summary: Summary, background: Background) -> list[Section]:
    if not background.against:
        return []
    rows = []
    for name, other in background.against.items():
        mine, theirs, what = measured_cost(summary, other)
        speed = summary.tokens_per_second / other.tokens_per_second
        change = f"{mine - theirs:+.4f} ({mine / theirs - 1:+.2%})"
        rows.append([name, change, f"{mine:.4f}", f"{theirs:.4f}", f"{speed:.2f} x", what])
    head = ["against", "loss difference", "here", "there", "speed here", "which loss"]
    runs = {background.name: summary, **background.against}
    caption = "Training loss over the seconds of computing, and the speed of the median step."
    return [Section("Compared", [Table(head, rows), Picture("comparison", comparison_figure(runs), caption)])]


def _sample(background: Background) -> list[Section]:
    return [] if background.sample is None else [Section("Sample", [background.sample])]


def _use(background: Background) -> Section:
    run = background.folder.as_posix()
    commands = f'thinpipe generate {run} --prompt "The "\nthinpipe eval {run}\nthinpipe export {run} exported'
    trust = ", trust_remote_code=True" if background.has_neck else ""
    python = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("exported"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("exported"{trust})'
    )
    kind = "a Hugging Face folder with code of its own" if background.has_neck else "an ordinary Hugging Face folder"
    text = f"The export is {kind}, which needs thinpipe no more:"
    return Section("Use the result", [Code(commands), Text(text), Code(python, "python")])


def _settings(summary: Summary, background: Background) -> Section:
    if not summary.starts:
        return Section("Settings and versions", [Text("The log does not say.")])
    started = summary.starts[-1]
    rows = own_settings(settings_of(summary), background.defaults)
    return Section(
        "Settings and versions",
        [
            Table(["setting", "here", "default"], rows),
            Folded("All settings", [Code(started.config.strip(), "toml")]),
            Table(["software", "version"], [[name, version] for name, version in started.versions.items()]),
        ],
    )
