"""`thinpipe report`: a figure and a few lines from a run's event log."""

from thinpipe.cli.settings import ReportConfig
from thinpipe.report.curve import draw_loss
from thinpipe.report.summary import summarise


def run(config: ReportConfig) -> int:
    summary = summarise(config.run)
    for line in summary.lines():
        print(line)
    path = config.output or config.run / "loss.png"
    draw_loss(summary, path, title=config.run.resolve().name)
    print(path)
    return 0
