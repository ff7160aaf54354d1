"""Ctrl+C once and twice: what people read, and what is left."""

import signal
import threading

import pytest

from tests.programs import Program
from thinpipe.config.toml import dump_toml
from thinpipe.training.graceful_shutdown import StopRequest


@pytest.fixture
def heard_interrupts():
    """As in a terminal; programs in the background are started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
def test_the_first_signal_is_announced_and_the_second_says_what_it_costs(capfd):
    announced = threading.Event()
    with StopRequest(announced.set, lambda: "3 steps are lost") as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        assert announced.wait(60)
        assert capfd.readouterr().err == ""
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "\nthinpipe: 3 steps are lost\n"


def test_a_run_that_is_interrupted_twice_says_how_many_steps_are_lost(run_config, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(run_config))
    endless = ("--training.steps", 10**6, "--metrics.log-freq", 1, "--checkpoint.interval", 10**6)
    run = Program(tmp_path, "run", "train", file, *endless)
    try:
        run.until(r"step: +3 ")
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGINT)
        code = run.finish()
    finally:
        run.stop()
    words = r"ended without saving: \d+ steps are lost. The same command goes on from the start: nothing was saved"
    if code == 130:
        assert run.until(words)
    else:  # both signals came as one, or the run was quicker
        assert (code, "stopped and saved" in run.printed) == (0, True)
