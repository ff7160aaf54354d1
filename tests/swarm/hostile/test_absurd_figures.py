"""Numbers that no machine measures, and errors while a generation begins: the hub refuses the numbers, and begins again
after any error."""

import logging
from dataclasses import replace

import msgspec
import pytest

from tests.monitor.sample_events import step
from tests.programs import PATIENCE
from tests.swarm.hubs import ask_again, ask_next, begin_generation, next_request, report, running_hub
from thinpipe.swarm.hub.commits.interval import ALONE_SECONDS, MARGIN
from thinpipe.swarm.protocol.messages import Assignment, EventReport, Refused, Standby


@pytest.fixture
def run_config(run_config):
    """Many steps; the hub chooses how often it commits."""
    training = replace(run_config.training, steps=100_000)
    return replace(run_config, training=training, checkpoint=replace(run_config.checkpoint, interval=None))


def absurd(**figures):
    """A report with these figures of the link, or of the processor."""
    honest = report()
    of_processor = {name: value for name, value in figures.items() if name in honest.processor.__struct_fields__}
    processor = msgspec.structs.replace(honest.processor, **of_processor)
    of_link = {name: value for name, value in figures.items() if name not in of_processor}
    return msgspec.structs.replace(honest, processor=processor, **of_link)


@pytest.mark.parametrize(
    "figures",
    [
        {"flops": 5e-324}, {"flops": 1e308}, {"up_bps": 1e-30}, {"up_bps": 1e308, "down_bps": 1e308},
        {"down_bps": 5e-324}, {"latency_s": 1e308}, {"memory_nbytes": (1 << 64) - 1}, {"threads": 1 << 63},
    ],
    ids=str,
)  # fmt: skip
def test_a_machine_that_cannot_be_is_refused_with_the_reason(figures, run_config):
    with running_hub(run_config) as running, running.connection("p0") as honest, running.connection("p1") as hostile:
        answer = ask_next(hostile, running, report=absurd(**figures))
        assert isinstance(answer, Refused)
        assert "report" in answer.text, "the place of the number"
        assert list(running.hub.membership.present) == []
        first, second = begin_generation(running, honest, hostile)
        assert (first.generation, second.generation) == (1, 1), "with figures that can be it may take part"


def test_steps_that_last_for_ever_do_not_keep_the_next_generation_from_beginning(run_config):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as hostile:
        assert ask_again(hostile, running).generation == 1
        for index in range(1, 8):
            event = msgspec.json.encode(step(index, seconds=1e308))
            hostile.publish("event", msgspec.msgpack.encode(EventReport(generation=1, event=event)))
        assert ask_again(hostile, running, left_generation=1).generation == 2
        assert not running.hub.run_host.progress, "none of these steps is believed"


def test_one_slow_uplink_does_not_switch_commits_off_for_all(run_config):
    with running_hub(run_config) as running, running.connection("p0") as honest, running.connection("p1") as slow:
        asked = slow.submit("next", next_request(running, report=absurd(up_bps=1e3)), seconds=PATIENCE)
        works = ask_again(honest, running), msgspec.msgpack.decode(asked.result(PATIENCE), type=Assignment)
        assert {work.generation for work in works} == {1}
        plan = running.hub.run_host._plan
        assert plan.send_seconds > 2 * ALONE_SECONDS, "or this shows nothing"
        step_seconds = running.hub.run_host._step_seconds._predicted
        assert (plan.interval - 1) * step_seconds < MARGIN * ALONE_SECONDS


def fails_once(monkeypatch, owner, name, error):
    """Makes a method raise when it is called for the first time."""
    method, calls = getattr(owner, name), []

    def called(*arguments, **more):
        calls.append(arguments)
        if len(calls) == 1:
            raise error
        return method(*arguments, **more)

    monkeypatch.setattr(owner, name, called)
    return calls


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("partition", ZeroDivisionError("division by zero")),
        ("number", OverflowError("cannot convert float infinity to integer")),
        ("link", ValueError("nonsense")),
        ("begin", OverflowError("cannot convert float infinity to integer")),
        ("display", RuntimeError("a broken terminal")),
        ("begin", KeyError("p7")),
    ],
)
def test_a_generation_begins_whole_or_not_at_all(place, error, run_config, monkeypatch, caplog):
    with (
        caplog.at_level(logging.ERROR),
        running_hub(run_config, hub_bps=None if place == "link" else (1e9, 1e9)) as running,
        running.connection("p0") as first,
        running.connection("p1") as second,
    ):
        generations, run_host = running.hub.generations, running.hub.run_host
        owner, name = {
            "partition": (generations.membership.candidates, "partitioner"),
            "number": (generations._generation_file, "write"),
            "link": (generations._link_file, "write"),
            "begin": (run_host, "begin"),
            "display": (run_host.display, "show"),
        }[place]
        if place == "link":
            generations.membership.present.hub_bps = (1e9, 1e9)
        if place != "display":
            calls = fails_once(monkeypatch, owner, name, error)
        else:
            calls = fails_at_start(monkeypatch, owner, error)
        works = begin_generation(running, first, second)
        assert len(calls) > 1
        assert works[0].generation == works[1].generation == generations.membership.replicas[0].current.number
        assert works[0].names == works[1].names == generations.membership.replicas[0].current.names
        assert generations.is_active("p0", works[0].generation)
        told = [line for line in running.printed if "cannot start a generation" in line]
        assert len(told) == 1
        assert type(error).__name__ in told[0]
        assert [record for record in caplog.records if record.exc_info and "hub.p" in record.getMessage()]


def fails_at_start(monkeypatch, display, error):
    """Makes the display fail at the first start of a generation."""
    show, calls = display.show, []

    def called(event):
        if type(event).__name__ == "GenerationStarted":
            calls.append(event)
            if len(calls) == 1:
                raise error
        show(event)

    monkeypatch.setattr(display, "show", called)
    return calls


def test_while_no_generation_can_begin_peers_wait_and_are_told_why(run_config, monkeypatch):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as only:

        def broken(*_):
            raise ZeroDivisionError

        monkeypatch.setattr(running.hub.run_host, "begin", broken)
        answer = ask_next(only, running)
        assert isinstance(answer, Standby)
        assert "cannot start a generation" in answer.text
        assert running.hub.membership.replicas[0].current is None
        assert running.hub.membership.last_generation < 30, "it does not try as fast as it can"
        monkeypatch.undo()
        assert isinstance(ask_again(only, running), Assignment)
