"""An exporter that fails gets no more events, and training continues."""

import io

import pytest
from rich.console import Console

from tests.monitor.sample_events import step
from thinpipe.training.console import DisplayWithExporters, LineDisplay, _close


class Broken:
    """As other people's code may be."""

    received = 0

    def on_event(self, _event):
        self.received += 1
        raise ValueError("[bold]no such run")

    def close(self):
        raise RuntimeError("nor can it be closed")


@pytest.fixture
def console():
    return Console(file=io.StringIO())


def test_it_gets_no_more_events(console, caplog):
    sink = Broken()
    display = DisplayWithExporters(LineDisplay(console, log_freq=1), [sink])
    for number in (1, 2):
        display.show(step(number))
    printed = console.file.getvalue()
    assert sink.received == 1
    (warning,) = caplog.records
    assert (warning.levelname, warning.args) == ("WARNING", ("Broken",))
    assert str(warning.exc_info[1]) == "[bold]no such run"
    assert printed.count("step:") == 2


def test_it_need_not_close(caplog):
    _close(Broken())
    (warning,) = caplog.records
    assert (warning.levelname, warning.args) == ("WARNING", ("Broken",))
    assert isinstance(warning.exc_info[1], RuntimeError)
