"""`thinpipe report`: writes a page from the event log of a run, and prints its summary."""

from thinpipe.api.report import make_report
from thinpipe.config.commands import ReportConfig
from thinpipe.report.comparison import compare, describe_cost


def run(config: ReportConfig) -> int:
    written = make_report(config.run, output=config.output, sample=config.sample, against=config.against)
    name, summary, others = config.run.resolve().name, written.summary, written.others
    for line in compare({name: summary, **others}) if others else summary.lines():
        print(line)
    for other in others:
        print(f"{name} against {other}: {describe_cost(summary, others[other])}")
    print(written.page)
    return 0
