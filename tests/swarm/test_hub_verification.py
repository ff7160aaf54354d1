"""The hub reads all of its newest checkpoint before a generation begins, however long that takes: peers are
answered."""

import asyncio
import threading

import pytest

from tests.programs import PATIENCE
from tests.swarm.hubs import ask_again, ask_next, begin_generation, running_hub
from thinpipe.swarm.hub import answers
from thinpipe.swarm.protocol.messages import Assignment, RestoreFiles, Standby


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(answers, "LONG_POLL_SECONDS", 1.5)


def slow_disk(run_host):
    """(how often all was read, what lets the reading end)."""
    looks, read, go_on = [], run_host.verify_newest, threading.Event()

    async def verify_newest():
        looks.append(1)
        await read()
        await asyncio.to_thread(go_on.wait, PATIENCE)

    run_host.verify_newest = verify_newest
    return looks, go_on


def test_peers_are_told_to_wait_while_the_hub_reads(run_config):
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        begin_generation(running, first, second)
        looks, go_on = slow_disk(running.hub.run_host)
        try:
            for _ in range(2):
                for connection in (first, second):
                    answer = ask_next(connection, running, left_generation=1)
                    assert isinstance(answer, Standby)
                    assert answer.text == "the hub verifies the checkpoint of step 0"
            assert running.hub.status().waits_for == answer.text
        finally:
            go_on.set()
        assert [work.generation for work in begin_generation(running, first, second)] == [2, 2]
        assert len(looks) == 1


def test_nothing_is_read_again_while_a_generation_cannot_begin(run_config):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        begin_generation(running, connection)
        looks, go_on = slow_disk(running.hub.run_host)
        go_on.set()
        number = running.hub.broker.folder / "generation"
        number.unlink()
        number.mkdir()
        for _ in range(2):
            answer = ask_next(connection, running, left_generation=1)
            assert isinstance(answer, Standby)
            assert answer.text.startswith("the hub cannot start a generation"), answer.text
        assert len(looks) == 1
        number.rmdir()
        assert isinstance(ask_again(connection, running, left_generation=1), Assignment)


def test_what_rots_after_it_was_read_is_found_when_the_generation_cannot_begin(run_config):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        begin_generation(running, connection)
        looks, go_on = slow_disk(running.hub.run_host)
        assert isinstance(ask_next(connection, running, left_generation=1), Standby)
        (running.hub.run_host.newest.path / "run.safetensors").unlink()
        go_on.set()
        answer = ask_again(connection, running, left_generation=1)
        assert isinstance(answer, RestoreFiles)
        assert list(answer.files) == ["run.safetensors"]
        assert len(looks) == 2
