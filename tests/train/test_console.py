"""What a terminal shows: lines above the progress bar, of the run and of whatever else its program says."""

import io
import re
from dataclasses import replace

from rich.console import Console

from thinpipe.core.events import LinkTraffic, Step
from thinpipe.core.hub_events import GenerationStarted, PeerAssignment
from thinpipe.training.console import LineDisplay, ProgressBarDisplay, open_display

LINK = LinkTraffic(boundary=0, forward=True, nbytes=10, waited_s=0.5, mbps=1.0)
STEP = Step(
    step=10,
    loss=2.0,
    grad_norm=1.0,
    lr=1e-3,
    tokens=10,
    seconds=1.0,
    tokens_per_second=10.0,
    links=[LINK],
    busy=[0.5, 1.0],
)
_ERASED = "\x1b[2K"


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=90, soft_wrap=True, highlight=False, markup=False)


def lines_of(console):
    """Printed lines that stay: what is before the last erasure of a line is gone from the screen."""
    plain = [line.rpartition(_ERASED)[2] for line in console.file.getvalue().splitlines()]
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line) for line in plain]


def test_lines_of_a_program_stand_alone_above_the_bar(run_config):
    console = terminal()
    with open_display(run_config, console=console) as display:
        console.print("anna joined")
        display.say("bert joined")
        display.working("saving")
    lines = lines_of(console)
    assert "anna joined" in lines
    assert "bert joined" in lines
    assert any(line.startswith("saving") for line in lines), "the bar says what is done now"


def test_the_line_of_the_links_is_shown_on_a_terminal_too():
    console = terminal()
    with ProgressBarDisplay(console, total_steps=20, log_freq=10) as display:
        display.show(STEP)
    shown = [line for line in lines_of(console) if "busiest link: 1.0 Mbps over boundary 0 forward" in line]
    assert len(shown) == 1
    assert "loss 2.0000  10 tokens/s" in console.file.getvalue()


def test_peers_are_named_once_it_is_known_who_computes():
    console = Console(file=io.StringIO(), width=300)
    display = LineDisplay(console, log_freq=1)
    peers = [PeerAssignment(name=name, segments=[index]) for index, name in enumerate(("anna", "bert"))]
    display.show(STEP)
    display.show(GenerationStarted(generation=1, step=0, peers=peers))
    display.show(replace_step(11))
    first, second = console.file.getvalue().splitlines()
    assert "slowest: process 1" in first
    assert "slowest: bert" in second


def replace_step(number):
    return Step(**{name: getattr(STEP, name) for name in STEP.__struct_fields__} | {"step": number})


def test_a_pipe_gets_no_word_of_what_is_done_now(run_config, capsys):
    with open_display(replace(run_config)) as display:
        display.working("saving")
        display.say("a line")
    assert capsys.readouterr().out == "a line\n"
