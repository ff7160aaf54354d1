"""`thinpipe report`: a figure and a few lines from the event logs of one run or several."""

from thinpipe.cli.settings import ReportConfig
from thinpipe.core.errors import UserError
from thinpipe.report.comparison import compare, draw_comparison
from thinpipe.report.curve import draw_loss
from thinpipe.report.summary import summarise


def run(config: ReportConfig) -> int:
    summary, name = summarise(config.run), config.run.resolve().name
    path = config.output or config.run / ("comparison.png" if config.against else "loss.png")
    if config.against:
        runs = {name: summary, **{other.resolve().name: summarise(other) for other in config.against}}
        if len(runs) <= len(config.against):
            raise UserError("two of these runs have the same name: rename a folder, or leave one out")
        draw_comparison(runs, path)
    else:
        draw_loss(summary, path, title=name)
    for line in compare(runs) if config.against else summary.lines():
        print(line)
    print(path)
    return 0
