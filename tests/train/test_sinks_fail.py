"""A sink that fails is told no more, and the run goes on."""

import io

import pytest
from rich.console import Console

from tests.monitor.sample_events import step
from thinpipe.train.console import DisplayWithExporters, LineDisplay, _close


class Broken:
    """As other people's code may be."""

    told = 0

    def on_event(self, _event):
        self.told += 1
        raise ValueError("[bold]no such run")

    def close(self):
        raise RuntimeError("nor can it be closed")


@pytest.fixture
def console():
    return Console(file=io.StringIO())


def test_it_is_told_no_more(console):
    sink = Broken()
    display = DisplayWithExporters(LineDisplay(console, log_freq=1), [sink], console)
    for number in (1, 2):
        display.show(step(number))
    printed = console.file.getvalue()
    assert sink.told == 1
    assert "Broken is told no more, the run goes on: ValueError: [bold]no such run\n" in printed
    assert "could not save" not in printed
    assert printed.count("step:") == 2


def test_it_need_not_close(console):
    _close(Broken(), console)
    assert "Broken was not closed, the run goes on: RuntimeError" in console.file.getvalue()
